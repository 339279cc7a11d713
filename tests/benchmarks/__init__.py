"""The two benchmarks against TRL: the same work in both, in one run on one machine, reported as a ratio.

``make bench-trl`` runs both, on a machine that does nothing else. By hand::

    make .venv-trl/.installed
    .venv/bin/python -m tests.benchmarks.trl_update --out outputs/bench --trl-python .venv-trl/bin/python
    .venv/bin/python -m tests.benchmarks.trl_iteration --out outputs/bench --trl-python .venv-trl/bin/python

Both take ``--threads`` and ``--quick`` (everything once and small, in less than a minute; its ratio means nothing), and
write one JSON file into ``--out``. Nothing here is asserted in a test as seconds: the ratio of one run is the result.

TRL lives in an environment of its own and shares torch, transformers and all other pins with ours. Each side runs in
processes of its own, in turns, so that neither suffers what the other left behind (threads, memory, caches).

``trl_update`` (rows to weights): ``update_data`` makes rows, ``update_ours`` and ``update_trl`` learn from them.
``trl_iteration`` (play and learn): ``zoo`` is the world, ``zoo_clone`` makes the policy that both sides start from,
``iteration_ours`` and ``iteration_trl`` train it. ``measure`` holds what both need.
"""
