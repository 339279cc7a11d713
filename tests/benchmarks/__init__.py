"""How fast dreams and updates are: the same work by us and by others, in one run on one machine, reported as a ratio.

``make bench`` runs all of it on a machine that does nothing else, and ends with ``table``. ``ARGS=--quick`` does
everything once and small, to see that it works: its ratios mean nothing. Each benchmark is also a command of its own,
``python -m tests.benchmarks.<name>``, with ``--help``.

``rollouts``       dreamed turns against ``generate`` and vLLM, random models (``dreaming`` is one side)
``dreams``         the same engine with and without drafts, models trained on TextWorld
``trl_update``     rows to weights, against TRL (``trl_side``)
``trl_iteration``  play and learn, against TRL: ``zoo`` is the world
``gpu``            dreams and updates of half a billion parameters on a CUDA card (``make bench-gpu``)

Nothing here is asserted in a test as seconds. Opponents live in environments of their own: vLLM and TRL must not decide
what we run with; TRL shares torch, transformers and all other pins with us. Each side runs in processes of its own, in
turns, so that neither suffers what the other left behind (threads, memory, caches). ``measure``, ``machine`` and
``table`` hold what all share.
"""
