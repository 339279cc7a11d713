"""How good is a world model to dream in? From predictions beside reality to numbers with n and interval."""
