"""A world model of pictures: the screen before a turn and its action in, the screen after it out."""
