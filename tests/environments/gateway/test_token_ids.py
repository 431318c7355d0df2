"""docs/environments.md: requests in token ids, and NeMo's token fields; an agent sees what was drawn, and
nothing else passes for it."""

import json
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest
from test_agents import END, Rollout, with_agents

from laminar_hpc.environments.gateway.chat import Rejected
from laminar_hpc.environments.gateway.tokens import continued, parse_prompt
from laminar_hpc.rollout.in_flight import Outcome
from laminar_hpc.rollout.partial_response import logprobs_of, tokens_of

SCRIPT = f"(again){END}"
WRONG = {
    "stop": ({"sampling_params": {"stop": ""}}, "stop: an empty text stands everywhere"),
    "guided": ({"sampling_params": {"guided_regex": "a"}}, "guided_regex: the policy is drawn from as"),
    "warmth": ({"sampling_params": {"warmth": 1}}, "'warmth': there is no such field here"),
    "elsewhere": ({"kv_transfer_params": {"a": 1}}, "'kv_transfer_params': there is no such field"),
    "choices": ({"sampling_params": {"n": 2}}, "n: one answer at a time"),
    "bias": ({"sampling_params": {"logit_bias": {"5": 1}}}, "logit_bias: the policy is drawn from"),
    "more": ({"sampling_params": {"logprobs": 5}}, "logprobs: there are those of the drawn tokens only"),
    "pictures": ({"features": {"mm_hashes": {}}}, "features, content_parts: token ids of text only"),
    "none": ({"token_ids": []}, "token_ids: at least one"),
    "type": ({"token_ids": ["a"]}, "Expected `int`, got `str` - at `$.token_ids[0]`"),
    "begin": ({"token_ids": [5, 6]}, "token_ids[0] is 5: conversations of this model begin with"),
}


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Path]:
    folder, path = tmp_path_factory.mktemp("token_ids"), list(sys.path)
    with pytest.MonkeyPatch.context() as patch:
        patch.chdir(folder)
        yield folder
    sys.path[:] = path


async def test_token_ids_in_token_ids_out(folder: Path) -> None:
    """What was given and drawn is the prefix of each later request, token by token; the answers name the
    drawn tokens and their log-probs as the package renderers reads them; the same request is drawn once; all
    else is refused in one line."""

    async def test(rollout: Rollout) -> None:
        first = [*rollout.encode("<pad>"), *rollout.encode("hello")]
        refused = {name: given for name, (given, _) in WRONG.items()}
        work = rollout.works("generates", ids=first, refused=refused)
        assert await rollout.run(work, lambda text: SCRIPT) == Outcome()
        seen = json.loads((folder / "generated.json").read_text())
        for name, (_, words) in WRONG.items():
            assert seen[name][0] == 400 and words in seen[name][1] and "\n" not in seen[name][1], seen[name]
        drawn = rollout.encode(SCRIPT)
        said = len(first) + len(drawn)
        for name, words in {
            "nothing new": f"token_ids: {said}, of {said} that were said",
            "other": f"token_ids[{said - 1}] is ",
            "unknown": "the model has no token 1048576",
            "messages": "a session speaks in messages or in token ids",
        }.items():
            assert seen[name][0] == 400 and words in seen[name][1], seen[name]
        one, same, cut = seen["answers"]
        assert one == same and one["request_id"] != cut["request_id"]
        for answer, expected, finish in ((one, drawn, "stop"), (cut, drawn[:2], "length")):
            [choice] = answer["choices"]
            assert choice["token_ids"] == expected and choice["finish_reason"] == finish
            content = choice["logprobs"]["content"]
            assert [each["token"] for each in content] == [f"token_id:{token}" for token in expected]
            assert [each["logprob"] for each in content] == [-(n + 1) / 8 for n in range(len(expected))]
        whole = [*work.group.prompt_tokens, *tokens_of(work.partial).tolist()]
        assert whole == [*first, *drawn, 7, 8, *drawn[:2]]
        assert [(s.start, s.end) for s in work.partial.spans] == [
            (len(first) - 1, len(first) - 1 + len(drawn)),
            (len(whole) - 3, len(whole) - 1),
        ]

    await with_agents(folder, "run", test)


async def test_fields_of_nemo(folder: Path) -> None:
    """An answer says which tokens were drawn, behind which, with which log-probs; it may come back so, and
    then the next has them too; one that comes back with others is refused."""

    async def test(rollout: Rollout) -> None:
        work = rollout.works("nemo")
        assert await rollout.run(work, lambda text: SCRIPT) == Outcome() and len(work.partial.spans) == 2
        seen = json.loads((folder / "nemo.json").read_text())
        whole = [*work.group.prompt_tokens, *tokens_of(work.partial).tolist()]
        for said, span in zip(seen["answers"], work.partial.spans, strict=True):
            assert said["generation_token_ids"] == whole[span.start + 1 : span.end + 1]
            assert said["prompt_token_ids"] == whole[: span.start + 1] and said["content"] == "(again)"
            assert said["generation_log_probs"] == logprobs_of(work.partial)[span.start : span.end].tolist()
        for field in ("prompt_token_ids", "generation_token_ids", "generation_log_probs"):
            assert seen[field] == (
                f"messages[2].{field}: not what was drawn; send each answer back as it was given"
            )

    await with_agents(folder, "run", test)


def test_a_prompt_only_grows() -> None:
    """The smallest cases of a prefix."""
    prompt = parse_prompt(json.dumps({"model": "policy", "token_ids": [1, 2, 3]}).encode())
    assert continued(prompt, [1, 2], True, 4) == [3] and prompt.max_tokens is None
    wrong = ([1, 2, 3], "3, of 3"), ([1, 2, 3, 4], "3, of 4"), ([1, 4], r"\[1\] is 2, where 4 was")
    for said, words in wrong:
        with pytest.raises(Rejected, match=words):
            continued(prompt, said, True, 4)
    with pytest.raises(Rejected, match="the model has no token 3"):
        continued(prompt, [1], False, 3)
