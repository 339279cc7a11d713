"""Rules mined from a log: what the world answers, foretold from the words of the episode itself."""
