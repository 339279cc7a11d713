cd /tmp/me; export PYTHONPATH=$PWD OMP_NUM_THREADS=1 PYTHONUNBUFFERED=1
P=/work/main/.venv/bin/python
T="train.updates=24 train.groups=12 train.group_size=6 train.lr=0.001 train.lr_end=0.1 train.max_kl=0.03 train.validation_tasks=48 train.validate_every=4 train.keep_every=4"
$P -m tests.benchmarks.rules_table --out outputs/or --worlds textworld --seeds 0 --training-seeds 1 2 --modes real true-outcomes true-new true-seen true-refusals collect.workers=1 evaluate.heldout_episodes=2 $T
