"""Synthetic experience replay (SynthER, arXiv 2303.06614): a diffusion model makes more transitions of logged ones."""
