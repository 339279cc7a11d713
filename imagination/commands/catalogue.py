"""The stages of the command line: what each does, reads and writes, and where its function is.

Nothing heavy is imported here: help and a mistyped command must not wait for torch.
"""

from __future__ import annotations

from collections.abc import Mapping

from imagination.commands.stage import Stage

_ALL = (
    Stage(
        name="demo",
        summary="the whole flow at once: collect, fit, clone, dream, evaluate, report",
        help=(
            "Runs every stage below in about twenty minutes on two CPU cores, then prints a table and where the\n"
            "page is. Stopped, it goes on where it was; finished, it only reports again; with other settings it\n"
            "does again what depends on them."
        ),
        reads="nothing",
        writes="everything that the stages below write",
        examples=("imagine demo", "imagine demo preset=tiny", "imagine demo run=demo-7 seed=7"),
        sections=(),
        function="imagination.commands.experiments.demo:demo",
        run="demo",
        preset="demo",
    ),
    Stage(
        name="demo-seeds",
        summary="the demo for seeds 0, 1 and 2, each beside a control that trains in the real games",
        help=(
            "One seed proves little. Runs the demo once a seed, then trains the same clone by the same updates in\n"
            "the real games: the upper bound that costs real steps. Seeds share the cores, one process each, whose\n"
            "words go to seed-0.log and so on: about an hour on two CPU cores. jobs=1 takes one after the other."
        ),
        reads="nothing",
        writes="seed-0/ seed-1/ seed-2/ (each a run, with its control/), table.md, table.json",
        examples=("imagine demo-seeds", "imagine demo-seeds preset=tiny run=tiny-seeds"),
        sections=(),
        function="imagination.commands.experiments.demo:demo_seeds",
        run="demo-seeds",
        preset="demo",
    ),
    Stage(
        name="pretrain",
        summary="a base model that has read many worlds, for runs to start from",
        help=(
            "Scripted agents of all skills play training tasks of many worlds, with sizes drawn anew; then a model\n"
            "that starts from nothing reads them, as world model and as policy. Stopped, it goes on where it was.\n"
            "pretrain.corpus=<run> reads the corpus of another run, on a GPU, say, with no world installed.\n"
            "Other runs start from it by worldmodel.model=<run>/models/base."
        ),
        reads="nothing",
        writes="models/base, tokenizer/, corpus/",
        examples=("imagine pretrain", "imagine pretrain run=deep pretrain.corpus=outputs/base pretrain.model.layers=8"),
        sections=("pretrain",),
        function="imagination.commands.pretrain:pretrain",
        run="base",
        preset="base",
    ),
    Stage(
        name="collect",
        summary="generate the games and log scripted agents of many skills in them",
        help=(
            "Makes tasks of the chosen world, a training and a held-out set, and plays them for real with an expert,\n"
            "noisy, careless and random agents. Every episode goes into the log; all later training starts from it."
        ),
        reads="nothing",
        writes="games/, log/",
        examples=("imagine collect run=mine", "imagine collect run=mine env=textworld_express env.options.game=twc"),
        sections=("env", "games", "collect"),
        function="imagination.commands.collect:collect",
    ),
    Stage(
        name="import",
        summary="logs of your own, in whatever format, in place of collect",
        help=(
            "usage: imagine import <format> <file or folder> ... run=<name>\n\n"
            "Reads logged episodes into the run's log: training tasks, and a share of tasks that is held out. What\n"
            "cannot be read is named (file, record, field), counted and left out. Reading a file again adds nothing\n"
            "twice. Secrets are masked. It says what the log covers and what it lacks to be dreamed on.\n\n"
            "formats:\n"
            "  auto         says which of these it sees, and why\n"
            "  openai       chat messages with tool calls\n"
            "  react        printed 'Action:' and 'Observation:', in text or a notebook\n"
            "  browser-use  folders of history.json and result.json; give the run's folder\n"
            "  minari       Minari's datasets with text spaces, or discrete ones that imports.names names\n"
            "  intercode    parallel arrays in turn_history; a reward is the score so far\n"
            "  commands     '> action' lines with the answers below them\n"
            "  agentgym     conversations of from, value and loss\n"
            "  huggingface  Parquet or JSON lines with messages, or with columns that imports.mapping names\n"
            "  jsonl        our own JSON lines: task_id, start, turns of action, observation, reward\n\n"
            "After it: `imagine fit-world-model`, `imagine clone`, `imagine train`, `imagine audit` with the same run=."
        ),
        reads="the files that you name",
        writes="log/, coverage.json, refused.jsonl, mask.key",
        examples=(
            "imagine import auto my-log.jsonl run=mine",
            "imagine import openai runs/*.json run=mine imports.solved_at=0.8 imports.heldout=0.1",
            "imagine import huggingface a.parquet run=mine imports.mapping.action=cmd imports.mapping.start=goal ...",
        ),
        sections=("imports",),
        function="imagination.commands.import_logs:import_logs",
        places=("imports.format", "imports.files"),
    ),
    Stage(
        name="fit-world-model",
        summary="learn from the log what the world answers to an action",
        help=(
            "Trains the world model on what the environment said in real episodes, never on its own dreams, and\n"
            "measures it on episodes it has not seen."
        ),
        reads="log/",
        writes="tokenizer/, models/worldmodel/ (worldmodel-1/, ... for further members), or models/screen/",
        examples=(
            "imagine fit-world-model run=mine",
            "imagine fit-world-model run=mine worldmodel.kind=delta worldmodel.members=3",
            "imagine fit-world-model run=mine worldmodel.model=Qwen/Qwen2.5-0.5B-Instruct worldmodel.lora.rank=16",
        ),
        sections=("worldmodel", "fit", "engine"),
        function="imagination.commands.fit_world_model:fit_world_model",
    ),
    Stage(
        name="rules",
        summary="what the world answers by rule: mined from the log, each with its evidence",
        help=(
            "Finds by counting when an action is refused and what its answer repeats, in the words of the episode\n"
            "itself, and keeps what is right on at least 99 % of the turns of other tasks (the lower end of the 95 %\n"
            "interval). `fit-world-model` does the same; here a run from before there were rules gets them. Dreams\n"
            "then answer by rule what a rule knows and ask the model for the rest (worldmodel.rules).\n"
            "With rules.url and rules.model a language model proposes further ones, which must pass the same test."
        ),
        reads="log/",
        writes="models/rules.json",
        examples=(
            "imagine rules run=mine",
            "imagine rules run=mine rules.url=http://localhost:8000/v1 rules.model=qwen",
        ),
        sections=("rules", "worldmodel"),
        function="imagination.commands.rules:rules",
    ),
    Stage(
        name="refine-world-model",
        summary="optional: RL of the world model on how right its answers to logged actions are",
        help=(
            "Answers logged actions several times, checks each answer against the log, and makes the right ones\n"
            "likelier (GRPO). The result takes the model's place only if it is no worse on held-out episodes. Run it\n"
            "before `clone`, whose policy starts from the world model."
        ),
        reads="log/, models/worldmodel/",
        writes="models/worldmodel/, models/worldmodel-before/, or models/worldmodel-refined/ where it is worse",
        examples=(
            "imagine refine-world-model run=mine",
            "imagine refine-world-model run=mine refine.metric=diff_f1 refine.lr=2e-5",
        ),
        sections=("refine", "worldmodel", "engine"),
        function="imagination.commands.refine_world_model:refine_world_model",
    ),
    Stage(
        name="reflect",
        summary="optional: other actions than the expert's, tried in the world model, as thoughts for the clone",
        help=(
            "Tries other actions at every turn of the log's experts: those of other episodes of the task, or those of\n"
            "reflect.proposer. Outcomes that the world model is sure of are told before the expert's action.\n"
            "clone.supplements=[reflections] imitates both; the policy then thinks, within max_action_tokens."
        ),
        reads="log/, models/worldmodel/",
        writes="supplements/reflections/",
        examples=("imagine reflect run=mine", "imagine reflect run=mine reflect.proposer=policy-clone"),
        sections=("reflect", "worldmodel", "dream", "engine"),
        function="imagination.commands.reflect:reflect",
    ),
    Stage(
        name="relabel",
        summary="optional: failed episodes of the log, retold with a goal that they did reach",
        help=(
            "hindsight.goals declares what the world's words say was reached. A failed episode up to the last such\n"
            "turn becomes one of an expert with that goal. clone.supplements=[hindsight] imitates them."
        ),
        reads="log/",
        writes="supplements/hindsight/",
        examples=("imagine relabel run=mine preset=textworld", "imagine relabel run=mine hindsight.max_turns=6"),
        sections=("hindsight",),
        function="imagination.commands.relabel:relabel",
    ),
    Stage(
        name="clone",
        summary="make the starting policy: imitate the mediocre agents of the log",
        help=(
            "Behaviour cloning: cross-entropy on the agent's tokens of the episodes by clone.agents. A policy without\n"
            "a checkpoint of its own starts from the world model's weights. clone.world_steps also learns what the\n"
            "world answers, clone.supplements imitates what `reflect` and `relabel` have written."
        ),
        reads="log/, models/worldmodel/",
        writes="models/policy-clone/",
        examples=("imagine clone run=mine", "imagine clone run=mine clone.agents=[expert,noisy] clone.steps=100"),
        sections=("policy", "clone"),
        function="imagination.commands.clone:clone",
    ),
    Stage(
        name="fit-critic",
        summary="optional: a critic that knows what the log earned, before PPO dreams",
        help=(
            "Fits the value head on the clone's hidden states to the returns of logged episodes; `train` with a\n"
            "critic (algorithm=ppo and its kin) then starts from it instead of from values of 0. With\n"
            "critic.synther.ratio=0.5, half of each batch is synthetic: transitions of a diffusion model that is\n"
            "fitted to the log first (SynthER); pip install 'imagination[diffusion]' brings what it needs."
        ),
        reads="log/, models/policy-clone/",
        writes="models/critic/; models/synther/ with critic.synther.ratio",
        examples=(
            "imagine fit-critic run=mine algorithm=ppo",
            "imagine fit-critic run=mine algorithm=turn_ppo critic.synther.ratio=0.5",
        ),
        sections=("critic", "algorithm", "policy"),
        function="imagination.commands.fit_critic:fit_critic",
    ),
    Stage(
        name="train",
        summary="improve the policy in dreams, without a real step",
        help=(
            "Plays groups of episodes inside the world model with the current policy, judges them by the chosen\n"
            "algorithm and updates the policy; expert episodes of the log are mixed in. Stopped, the same command\n"
            "goes on from the last checkpoint. train.world=real plays the same updates in the real games, as a control."
        ),
        reads="log/, models/worldmodel/, models/policy-clone/",
        writes="models/policy/, checkpoints/, metrics.jsonl, rollouts.jsonl",
        examples=(
            "imagine train run=mine",
            "imagine train run=mine algorithm=ppo algorithm.gamma=0.99",
            "imagine train run=mine train.updates=5 dream.min_confidence=0.9 engine=vllm",
        ),
        sections=("train", "algorithm", "dream", "tripwires", "engine"),
        function="imagination.commands.train:train",
    ),
    Stage(
        name="loop",
        summary="act a little for real where it teaches most, refit, dream, improve; every real step is counted",
        help=(
            "Rounds of five steps, until loop.budget real steps are spent: choose tasks by what log and dreams say of\n"
            "them, play the policy there for real, fit the world model on to all real transitions, promote the result\n"
            "only where it is no worse on held-back real episodes, and improve the policy in its dreams. Without a\n"
            "log scripted agents play first, within the budget; a world model and a clone that are missing are made.\n"
            "Stopped at any point, even killed, it goes on where it was; a larger loop.budget goes on with a finished\n"
            "one. The run's log and world model grow; a copy of its folder keeps what they were."
        ),
        reads="nothing, or what the stages above write",
        writes="games/, log/, models/, loop/, metrics.jsonl, summary.json",
        examples=(
            "imagine loop run=mine loop.budget=2000",
            "imagine loop run=fresh env=textworld_express loop.budget=5000 loop.first_episodes=100",
            "imagine loop run=plain loop.choice=uniform",
        ),
        sections=("loop", "collect", "dream", "train", "algorithm", "tripwires", "fit", "worldmodel", "engine"),
        function="imagination.commands.loop:loop",
    ),
    Stage(
        name="evaluate",
        summary="the verdict: the policy before and after, in the real games and in the dream",
        help=(
            "Plays training and held-out games for real and in dreams, replays dreams in the real games, and measures\n"
            "the world model on the policy's own actions."
        ),
        reads="games/, models/",
        writes="rollouts.jsonl, summary.json",
        examples=("imagine evaluate run=mine", "imagine evaluate run=mine evaluate.episodes=100"),
        sections=("evaluate", "engine"),
        function="imagination.commands.evaluate:evaluate",
    ),
    Stage(
        name="audit",
        summary="is the world model good enough to dream in? with reasons, intervals and examples",
        help=(
            "Measures a world model: exact match by turn and by size of the change, rewards, calibration, refusals,\n"
            "action sensitivity and drift; in the real games also whether it ranks policies as they really rank, and\n"
            "how it judges the policy's own actions. Where no real game is there, the log alone is judged."
        ),
        reads="log/, models/, games/ where it is there",
        writes="audit.json, audit.html (worldmodel.kind=screen: audit-screens.json)",
        examples=(
            "imagine audit run=mine",
            "imagine audit run=mine audit.episodes=100",
            "imagine audit run=mine audit.policies=[outputs/a/models/policy,outputs/b/models/policy]",
        ),
        sections=("audit", "evaluate", "dream", "engine"),
        function="imagination.commands.audit:audit",
    ),
    Stage(
        name="audit-table",
        summary="the targets of the audit for seeds 0, 1 and 2, or for runs that you name",
        help=(
            "Audits every world model of several runs. Runs that are there are used; missing ones of seeds 0, 1 and 2\n"
            "are made as far as an audit needs them, with checkpoints of the policy kept on the way. Those get the\n"
            "world models of audit.others, too: one that writes edits, fitted to the same log. Their clones are also\n"
            "trained in dreams alone, with guard and tripwires and without (ablation=gating). Runs share the cores,\n"
            "one process each (jobs=1 takes one after the other): an hour and a half on two CPU cores."
        ),
        reads="nothing, or the runs of audit.runs",
        writes="audit-table.md, audit-table.json, gating.json; audit.json and audit.html in each run",
        examples=(
            "imagine audit-table",
            "imagine audit-table audit.runs=[outputs/a,outputs/b] audit.world_models=[worldmodel]",
        ),
        sections=("audit",),
        function="imagination.commands.experiments.audit_table:audit_table",
        run="demo-seeds",
        preset="demo",
    ),
    Stage(
        name="ablate",
        summary="what is a setting worth? the same clones trained with and without it, and played for real",
        help=(
            "Starts from the clones and world models of several runs, trains each arm in a folder of its own, and\n"
            "plays every result in the same real games. Missing runs of seeds 0, 1 and 2 are made. An arm that was\n"
            "finished is not done again; about two minutes an arm and a seed. Runs share the cores, one process each\n"
            "(jobs=1 takes one after the other)."
        ),
        reads="nothing, or the runs of ablation.runs",
        writes="arms/, ablation.md, ablation.json",
        examples=(
            "imagine ablate ablation=gating",
            "imagine ablate ablation=masks ablation.runs=[outputs/demo] run=masks",
            "imagine ablate ablation.arms.grpo=algorithm=grpo ablation.arms.rloo=algorithm=rloo",
        ),
        sections=("ablation",),
        function="imagination.commands.experiments.ablate:ablate",
        run="demo-seeds",
    ),
    Stage(
        name="few-shot",
        summary="train in dreams of new tasks, known by a few logged episodes; no model is fitted again",
        help=(
            "Takes the run's world model and clone, and at most few_shot.episodes logged episodes of each held-out\n"
            "task (log them with collect.heldout_episodes=20). Dreams begin where those episodes did; what they have\n"
            "shown stands in the world model's prompt where it was fitted with worldmodel.facts. Beside it, the same\n"
            "clone is trained in the real tasks by about as many real steps as the log of them took."
        ),
        reads="games/, log/, models/worldmodel/, models/policy-clone/",
        writes="few-shot/, few-shot.json, few-shot.md",
        examples=("imagine few-shot run=mine", "imagine few-shot run=mine few_shot.episodes=5 few_shot.control=false"),
        sections=("few_shot", "dream", "train", "algorithm", "evaluate", "engine"),
        function="imagination.commands.experiments.few_shot:few_shot",
    ),
    Stage(
        name="compare",
        summary="put dreams beside reality, turn by turn, and show where they part",
        help=(
            "Lets the policy dream, replays its dreamed actions in the real games, dreams logged episodes again with\n"
            "their own actions, and aligns both sides turn by turn: where do they part first, and in what? Then the\n"
            "same policy free in both worlds: success, length, actions, tokens and cost. Logs of worlds that this\n"
            "program cannot play are compared as far as they go. compare.html is one file to search, filter and\n"
            "share; compare.show=<id> prints one pair and plays nothing."
        ),
        reads="models/, and games/ or log/ (compare.show: compare.json)",
        writes="compare.html, compare.json (worldmodel.kind=screen: compare-screens.html and .json)",
        examples=(
            "imagine compare run=mine",
            "imagine compare run=mine compare.policy=policy-clone compare.episodes=50",
            "imagine compare run=mine compare.show=dream/train/tw-r3-o5-q5-s1/0",
        ),
        sections=("compare",),
        function="imagination.commands.compare:compare",
    ),
    Stage(
        name="serve",
        summary="the world model as an environment server: OpenEnv, AgentGym, and a page to play in it by hand",
        help=(
            "Answers clients of two protocols until Ctrl-C. An episode begins at a state of the log, chosen by task\n"
            "and seed; every step is dreamed, and says how sure the world model is and whether the guard trusts it.\n\n"
            "  OpenEnv     ws://127.0.0.1:8000: reset(seed=0) or reset(seed=0, task=...), step({'message': 'look'})\n"
            "  AgentGym    http://127.0.0.1:8000/agentgym: a task's number is data_idx\n"
            "  by hand     http://127.0.0.1:8000/ in a browser\n"
            "  watch       /health, /metrics (Prometheus)\n\n"
            "Only this machine may ask. For others: serve.host=0.0.0.0 and a token in the environment variable\n"
            "IMAGINE_SERVE_TOKEN, which clients send as Bearer or as the password in the address. TLS is for a proxy\n"
            "in front of it. `pip install 'imagination[serve]'` brings what it needs."
        ),
        reads="log/, models/worldmodel/",
        writes="nothing",
        examples=(
            "imagine serve run=mine",
            "imagine serve run=mine serve.port=9000 serve.sessions=256 engine.slots=256",
            "imagine serve run=mine serve.branch=true dream.temperature=0",
        ),
        sections=("serve", "dream", "engine"),
        function="imagination.commands.serve:serve",
        writes_run=False,
    ),
    Stage(
        name="report",
        summary="put the results of a run on one page: imagined against real",
        help=(
            "Reads what the other stages wrote and draws the curves. It trains nothing and may be run at any time.\n"
            "Beside a control/ in the run folder it says what the same success costs without dreams."
        ),
        reads="summary.json, metrics.jsonl, rollouts.jsonl, control/ (where there is one)",
        writes="report.html, report.md, report.json",
        examples=("imagine report run=mine", "imagine report run=mine machine_price=0.5"),
        sections=(),
        function="imagination.commands.report:report",
    ),
    Stage(
        name="list",
        summary="the runs under the output folder: settings, stages done, results",
        help=(
            "Lists every run with the settings that were chosen for it, the stages that are done with them, real\n"
            "success on the training tasks before and after training, and what the audit says. listing.format=json\n"
            "prints the same for programs, with every setting that is not the default."
        ),
        reads="of every run: config.yaml, overrides.json, summary.json, audit.json",
        writes="nothing",
        examples=("imagine list", "imagine list output=outputs listing.format=json"),
        sections=("listing",),
        function="imagination.commands.list_runs:list_runs",
        writes_run=False,
    ),
)
STAGES: Mapping[str, Stage] = {stage.name: stage for stage in _ALL}
