"""If these fail, the models read a conversation that their chat template never wrote, or learn from each other's words.

Every content of the hand-computed episode is a token of its own, so sequences can be written down and counted.
"""

from __future__ import annotations

from dataclasses import replace

import pytest
from hypothesis import assume, given, settings
from hypothesis import strategies as st
from tokenizers import AddedToken
from transformers import PreTrainedTokenizerBase

from policy.lm.render import ChatFormat, Tokens, append_observation, policy_prompt, render_for_policy
from real_envs.trajectory import Owner, Source, StopReason, Trajectory, Turn
from tests.support.chats import EPISODE, OUR_CHAT, OURS, QWEN2, QWEN2_CHAT, ids, ours
from tests.support.refusal import refused

S, A, E = Owner.SCAFFOLD, Owner.AGENT, Owner.ENV

# --- ChatFormat ---


def by_template(tokenizer: PreTrainedTokenizerBase, contents: list[str]) -> list[int]:
    """What the template itself makes of user and assistant contents in turn, ready for the assistant to go on."""
    roles = ["user", "assistant"] * len(contents)
    messages = [{"role": role, "content": text} for role, text in zip(roles, contents, strict=False)]
    text = tokenizer.apply_chat_template(messages, tokenize=False, add_generation_prompt=True)
    return list(tokenizer.encode(text, add_special_tokens=False))


def by_pieces(chat: ChatFormat, contents: list[str]) -> list[int]:
    found = list(chat.opening)
    for k, content in enumerate(contents):
        found += chat.encode(content)
        found += chat.to_assistant if k % 2 == 0 else (chat.stop, *chat.to_user)
    return found


CONTENTS = [
    ["You see a lamp."],
    ["You see a lamp.\n\n-= Hall =-", "take lamp", "Taken. Öffne die Tür 🚪?", "go  east", "The end\n"],
    ["", "", " lead and trail ", "n't", "0123"],
]


@pytest.mark.parametrize("contents", CONTENTS, ids=len)
@pytest.mark.parametrize("chat", [OUR_CHAT, QWEN2_CHAT], ids=["ours", "qwen2"])
def test_pieces_are_the_template_token_for_token(chat: ChatFormat, contents: list[str]) -> None:
    """Else a pretrained model is prompted in a dialect of its format, and trained on it."""
    assert by_pieces(chat, contents) == by_template(chat.tokenizer, contents)


@settings(max_examples=60)
@given(st.lists(st.text(max_size=20), min_size=1, max_size=5).filter(lambda texts: len(texts) % 2 == 1))
def test_our_pieces_are_our_template_for_any_content(contents: list[str]) -> None:
    """Any but the template's own marks, which are plain text in a content (hypothesis reads them in our source)."""
    assume(not any(mark in text for text in contents for mark in OURS.all_special_tokens))
    assert by_pieces(OUR_CHAT, contents) == by_template(OURS, contents)


@pytest.mark.parametrize("chat", [OUR_CHAT, QWEN2_CHAT], ids=["ours", "qwen2"])
def test_a_mark_in_a_content_is_plain_text(chat: ChatFormat) -> None:
    """Else a page could end its own message and speak for the agent."""
    for mark in chat.tokenizer.all_special_tokens:
        found = chat.encode(f"go {mark} east")
        assert not set(found) & set(chat.tokenizer.all_special_ids)
        assert chat.decode(found) == f"go {mark} east"


def test_so_is_a_mark_that_is_not_declared_special() -> None:
    """As DeepSeek's marks of roles are not."""
    tokenizer = ours("{% for m in messages %}<U>{{ m['content'] }}<|end|>{% endfor %}<U>")
    tokenizer.add_tokens([AddedToken("<U>", normalized=False)])
    chat = ChatFormat(tokenizer)
    assert [chat.stop, *chat.to_user] == tokenizer.encode("<|end|><U>")
    ids = chat.encode("go <U> east<U>")
    assert not {chat.stop, *chat.to_user} & set(ids)
    assert chat.decode(ids) == "go <U> east<U>"


def test_the_pieces_of_chatml() -> None:
    """The end token is what the model samples; the line feed after it belongs to the next user turn."""
    assert QWEN2.convert_ids_to_tokens(QWEN2_CHAT.stop) == "<|im_end|>"
    assert QWEN2.decode(QWEN2_CHAT.opening) == (
        "<|im_start|>system\nYou are a helpful assistant.<|im_end|>\n<|im_start|>user\n"
    )
    assert QWEN2.decode(QWEN2_CHAT.to_assistant) == "<|im_end|>\n<|im_start|>assistant\n"
    assert QWEN2.decode(QWEN2_CHAT.to_user) == "\n<|im_start|>user\n"


def test_decoding_drops_marks_and_keeps_words() -> None:
    """An action with a mark of the template in it would be a command that no world knows."""
    assert OUR_CHAT.decode(ids("<|user|>", "go east", "\n[reward=0]", "<|end|>")) == "go east\n[reward=0]"


def test_a_lone_surrogate_is_read_as_a_question_mark() -> None:
    """A string of Python may hold one and no tokenizer takes it: one odd command would end all rollouts of a batch."""
    assert OUR_CHAT.encode("go \ud800 east") == OUR_CHAT.encode("go ? east")


EACH = "{% for m in messages %}"
OPEN, CLOSE = "{{ '<|' + m['role'] + '|>' }}", "{{ '<|end|>' }}{% endfor %}"
PROMPT = "{% if add_generation_prompt %}{{ '<|assistant|>' }}{% endif %}"


@pytest.mark.parametrize(
    ("template", "message"),
    [
        (EACH + OPEN + "{{ m['content'] }}" + CLOSE + PROMPT, None),  # nothing wrong: the others differ in one thing
        (EACH + OPEN + "{% if loop.last %}{{ m['content'] }}{% endif %}" + CLOSE + PROMPT, "drops or repeats"),
        (EACH + OPEN + "{{ m['content'] + m['content'] }}" + CLOSE + PROMPT, "drops or repeats"),
        (EACH + OPEN + "{{ m['content'] if loop.last else m['content'][:3] }}" + CLOSE + PROMPT, "drops or repeats"),
        (EACH + OPEN + "{{ m['content'] | trim }}" + CLOSE + PROMPT, "trims blanks"),  # Llama 3, Gemma
        (
            EACH + OPEN + "{{ m['content'].lstrip('\n') if m.role == 'user' else m['content'] }}" + CLOSE + PROMPT,
            "trims",
        ),
        (EACH + OPEN + "{{ m['content'].rstrip() if m.role != 'user' else m['content'] }}" + CLOSE + PROMPT, "trims"),
        (EACH + OPEN + "{{ loop.index ~ m['content'] }}" + CLOSE + PROMPT, "differently at"),
        (EACH + OPEN + "{{ m['content'] }}{{ ' NOW' if loop.last }}" + CLOSE + PROMPT, "differently at"),
        (  # reasoning models: the prompt opens a thought that the history does not have
            EACH + OPEN + "{{ m['content'] }}" + CLOSE + "{{ '<|assistant|><think>' }}",
            "differently at",
        ),
    ],
)
def test_a_template_that_does_not_grow_by_appending_is_refused(template: str, message: str | None) -> None:
    """With it a prompt is no prefix of the next one: tokens that were sampled would be trained in another context."""
    if message is None:
        ChatFormat(ours(template))
        return
    with pytest.raises(ValueError, match=message):
        ChatFormat(ours(template))


THINKING = "{{ '<|assistant|>' ~ ('' if enable_thinking is defined and not enable_thinking else '<think>') }}"


@pytest.mark.parametrize(
    ("template", "way_out"),
    [
        (EACH + OPEN + "{{ m['content'] }}" + CLOSE + THINKING, "with enable_thinking=false it would do"),
        (EACH + OPEN + "{{ m['content'] }}" + CLOSE + "{{ '<|assistant|><think>' }}", "training template"),
        (EACH + "{{ m['content'][0].text.strip() }}" + CLOSE + PROMPT, "training template"),  # of pictures and texts
        (EACH + "{{ raise_exception('no system') }}" + CLOSE, "training template"),
        (EACH + "{{ m['content'] ", "training template"),
        ("{% for m in messages %}{{ m['content'] }}{% endfor %}", "training template"),  # no end of a turn
    ],
)
def test_a_refused_template_is_a_line_that_names_the_setting_and_what_would_do(template: str, way_out: str) -> None:
    refused(lambda: ChatFormat(ours(template)), "policy.chat_template=", "enable_thinking = false", way_out)


def test_what_is_said_of_thoughts_is_true() -> None:
    template = EACH + OPEN + "{{ m['content'] }}" + CLOSE + THINKING
    ChatFormat(ours("{% set enable_thinking = false %}\n" + template))


def test_no_template_at_all_is_refused() -> None:
    tokenizer = ours()
    tokenizer.chat_template = None
    with pytest.raises(ValueError, match="chat template"):
        ChatFormat(tokenizer)


# --- the policy's view ---


def test_the_policys_view_by_hand() -> None:
    """What the policy is cloned from: its actions with their ends, after the prompts that it will be given."""
    tokens = render_for_policy(OUR_CHAT, EPISODE)
    assert tokens.ids == ids(
        "<|user|>", "ATTIC", "<|end|>", "<|assistant|>", "go east", "<|end|>",
        "<|user|>", "HALL", "<|end|>", "<|assistant|>", "take lamp", "<|end|>",
    )  # fmt: skip
    assert tokens.owners == [S, E, S, S, A, A, S, E, S, S, A, A]
    assert tokens.turns == [-1, -1, -1, -1, 0, 0, -1, -1, -1, -1, 1, 1]


def test_a_logged_thought_stands_before_its_action_where_it_is_asked_for() -> None:
    """It belongs to the agent, as what it samples will; who clones a log without thoughts does not see it."""
    first, second = EPISODE.turns
    thinking = replace(EPISODE, turns=(replace(first, info={"reasoning": "HALL"}), second))
    assert render_for_policy(OUR_CHAT, thinking) == render_for_policy(OUR_CHAT, EPISODE)
    tokens = render_for_policy(OUR_CHAT, thinking, thoughts=True)
    own = [token for token, owner in zip(tokens.ids, tokens.owners, strict=True) if owner == A]
    assert OUR_CHAT.decode(own) == "HALL\n[action]\ngo easttake lamp"
    assert tokens.ids[:4] == ids("<|user|>", "ATTIC", "<|end|>", "<|assistant|>")


def test_the_last_answer_is_there_where_it_is_asked_for() -> None:
    plain, whole = render_for_policy(OUR_CHAT, EPISODE), render_for_policy(OUR_CHAT, EPISODE, whole=True)
    assert whole.ids == plain.ids + ids("<|user|>", "THE END", "<|end|>", "<|assistant|>")
    assert whole.owners[len(plain.ids) :] == [S, E, S, S]


def test_actions_of_a_logged_history_belong_to_whom_the_caller_says() -> None:
    """In a branched start they are context: owned by the agent, the policy would train on what it did not sample."""
    tokens = policy_prompt(OUR_CHAT, "ATTIC", EPISODE.turns[:1], Owner.SCAFFOLD)
    assert tokens.ids == render_for_policy(OUR_CHAT, EPISODE).ids[:10]
    assert tokens.owners == [S, E, S, S, S, S, S, E, S, S]


turns = st.builds(
    Turn,
    action=st.text(max_size=12),
    observation=st.text(max_size=12),
    reward=st.sampled_from([None, 0.0, 1.0, 0.25]),
    terminated=st.booleans(),
)


@settings(max_examples=60)
@given(st.text(max_size=12), st.lists(turns, min_size=1, max_size=4), st.sampled_from([OUR_CHAT, QWEN2_CHAT]))
def test_a_prompt_is_a_prefix_of_the_next_one(start: str, played: list[Turn], chat: ChatFormat) -> None:
    """The conversation grows by appending. Else cached keys and values stand for other tokens, and what a model was
    trained on is not what it is asked in a rollout. The order of pieces is written down here again, as a plain loop."""
    whole = Trajectory("e", "t", "g", Source.REAL, "a", 0, start, tuple(played), StopReason.TURN_LIMIT)
    of_policy = render_for_policy(chat, whole)
    grown = policy_prompt(chat, start, [], Owner.AGENT)
    for k, turn in enumerate(played):
        asked = policy_prompt(chat, start, played[:k], Owner.AGENT)
        assert asked == grown
        assert of_policy.ids[: len(asked.ids)] == asked.ids
        grown.append((*chat.encode(turn.action), chat.stop), Owner.AGENT, k)
        if k == len(played) - 1:
            assert of_policy == grown  # and it ends with the last action
        append_observation(chat, grown, turn.observation)


def test_appending_keeps_the_lists_parallel() -> None:
    tokens = Tokens.empty()
    tokens.append((7, 8), Owner.AGENT, 3)
    tokens.append((9,), Owner.SCAFFOLD)
    assert (tokens.ids, tokens.owners, tokens.turns) == ([7, 8, 9], [A, A, S], [3, 3, -1])
