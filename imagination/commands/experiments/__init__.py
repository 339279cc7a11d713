"""Commands that train or compare several runs, and what they share."""
