"""The demo: prompts, answers and grades as text, its environment turn by turn, and its policy."""

from __future__ import annotations

import random
from itertools import count
from types import SimpleNamespace

import pytest
import torch
from tensordict import TensorDict

from headrace.pipeline.reverse import digits
from headrace.pipeline.train import RepeatSampler
from headrace.transforms import pack


def text_of(ids: torch.Tensor) -> str:
    return "".join(digits.token_texts(ids.tolist()))


def test_the_prompt_of_a_revision_has_the_prompt_and_the_draft():
    """A draft without an end has four digits."""
    dice, asked = random.Random(0), digits.prompts()
    numbers = dice.sample(range(len(asked)), 50)
    drafts = ["".join(dice.choices("0123456789", k=dice.randint(0, 4))) for _ in numbers]
    tokens = [
        [*map(int, draft), *[digits.END] * (len(draft) < 4), *[digits.PAD] * (3 - len(draft))]
        for draft in drafts
    ]
    found = digits.revision_prompts(asked[numbers], torch.tensor(tokens))
    for row, number, draft in zip(found, numbers, drafts, strict=True):
        end = "." if len(draft) < 4 else ""
        assert text_of(row) == f"{text_of(asked[number])}{draft}{end} Again: "


def test_only_the_reversed_prompt_gets_the_grade_1():
    asked, answers = digits.prompts(), digits.answers()
    for prompt, answer in zip(asked, answers, strict=True):
        assert text_of(answer) == f"{text_of(prompt).removesuffix(' backwards? ')[::-1]}."
    assert digits.graded(answers, answers).unique().tolist() == [1.0]
    one_two, two_one = (next(row for row in answers if text_of(row) == text) for text in ("12.", "21."))
    assert digits.graded(one_two[None], two_one[None]).item() == torch.tensor(1 / 3).item()


@pytest.mark.torchrl
def test_specs_of_the_environment_fit_its_rows():
    """Half of the rollouts are revised, so all columns of both turns are compared with the specs."""
    from torchrl.envs import check_env_specs

    from headrace.pipeline.reverse import ReverseEnv

    sampler = RepeatSampler(len(digits.STRINGS), prompts_per_batch=3, group_size=4)
    check_env_specs(ReverseEnv(sampler, revised=0.5))


def tokens_of(texts: list[str]) -> torch.Tensor:
    """Responses of four tokens. A dot is the end."""
    rows = [[digits.END if each == "." else int(each) for each in text] for text in texts]
    return torch.tensor([row + [digits.PAD] * (4 - len(row)) for row in rows])


@pytest.mark.torchrl
def test_a_slot_runs_one_revised_rollout_or_two_rollouts_of_one_turn():
    """In each of two groups of four rollouts, two are revised and two are not, so there are three slots."""
    from headrace.pipeline.reverse import ReverseEnv

    def draw(prompts: list[int]) -> TensorDict:
        ids = torch.arange(8)
        columns = {"prompt": torch.tensor(prompts).repeat_interleave(4), "group_id": 70 + ids // 4}
        return TensorDict(columns | {"rollout_id": 50 + ids, "expected_rollouts": torch.full((8,), 4)}, [8])

    number = {"".join(map(str, each)): at for at, each in enumerate(digits.STRINGS)}
    draws = [draw([number["12"], number["345"]]), draw([number["7"], number["08"]])]
    sampler = RepeatSampler(len(digits.STRINGS), prompts_per_batch=2, group_size=4)
    env = ReverseEnv(sampler, draws=iter(draws), revised=0.5)
    first = env.reset()
    slots = [0, 1, 2, 4, 5, 6], [0, 1, 3, 4, 5, 7]  # the rollouts of the two turns
    goes_on = torch.tensor([True, True, False] * 2)
    asked = [text_of(row) for row in first["tokens", "prompt"]]
    assert asked == ["12 backwards? "] * 3 + ["345 backwards? "] * 3
    answers = tokens_of(["21.", "2.", "2134", "543.", "54.", "5"])
    one, again = env.step_and_maybe_reset(first.set(("tokens", "response"), answers))
    one = one["next"]
    assert one["reward"].flatten().tolist() == pytest.approx([0, 0, 2 / 3, 0, 0, 1 / 4])
    assert one["done"].flatten().tolist() == (~goes_on).tolist()
    assert one["status"].flatten().tolist() == [0, 0, 1, 0, 0, 1]  # without an end, truncated
    assert [text_of(row) for row in again["tokens", "prompt"]] == [
        "12 backwards? 21. Again: ",
        "12 backwards? 2. Again: ",
        "12 backwards? ",
        "345 backwards? 543. Again: ",
        "345 backwards? 54. Again: ",
        "345 backwards? ",
    ]
    answers = tokens_of(["21.", ".", "1", "543.", "543", "345."])
    two, third = env.step_and_maybe_reset(again.set(("tokens", "response"), answers))
    two = two["next"]
    assert two["reward"].flatten().tolist() == pytest.approx([1, 0, 0, 1, 3 / 4, 2 / 4])
    assert two["done"].all()
    assert two["status"].flatten().tolist() == [0, 0, 1, 0, 1, 0]
    for rows, rollouts in zip((first, again), slots, strict=True):
        assert rows["rollout_id"].flatten().tolist() == [50 + each for each in rollouts]
        assert rows["group_id"].flatten().tolist() == [70 + each // 4 for each in rollouts]
        assert rows["expected_rollouts"].unique().tolist() == [4]
        assert rows["status"].unique().tolist() == [0]
    asked = [text_of(row) for row in third["tokens", "prompt"]]
    assert asked == ["7 backwards? "] * 3 + ["08 backwards? "] * 3
    assert (env.frames_per_batch, env.whole_draws) == (12, True)


@pytest.mark.torchrl
def test_a_grader_fails_on_the_rows_whose_random_number_is_below_the_probability(monkeypatch):
    """The clock goes on by a quarter of a second each time that it is read: twice for each turn."""
    from headrace.pipeline.reverse import ReverseEnv

    clock = SimpleNamespace(perf_counter=count(100, 0.25).__next__)
    monkeypatch.setattr("headrace.pipeline.reverse.env.time", clock)
    sampler = RepeatSampler(len(digits.STRINGS), prompts_per_batch=2, group_size=8)
    for seed in (0, 3):
        drawn = torch.rand(20, 1, generator=torch.Generator().manual_seed(seed))
        drawn = drawn.view(2, 10).tolist()  # of two turns
        for failing in (None, 0.0, *sorted(drawn[0])[4:6]):
            options = {} if failing is None else {"failing": failing}
            made = ReverseEnv(sampler, seed=seed, **options)  # by default, two of eight rollouts are revised
            answers = made.reset().set(("tokens", "response"), tokens_of(["1."]).expand(10, 4))
            for turn, numbers in enumerate(drawn, start=1):
                status = made.step(answers)["next", "status"].flatten().tolist()
                assert status == [3 * (number < (failing or 0)) for number in numbers]
                assert made.reward_seconds == turn * 0.25
    for options in ({"failing": 1.0}, {"failing": -0.1}, {"revised": 1.5}, {"revised": -0.5}):
        said = r"revised must be in \[0, 1\] and failing in \[0, 1\); got"
        with pytest.raises(ValueError, match=said):
            ReverseEnv(sampler, **options)


@pytest.mark.torchrl
def test_a_slot_has_two_turns_so_the_turns_of_a_group_are_even():
    """A revised rollout has two turns, any other has one."""
    from headrace.pipeline.reverse import ReverseEnv

    for size in (2, 3, 4):
        sampler = RepeatSampler(30, prompts_per_batch=6, ranks=2, group_size=size)
        for revised in range(size + 1):
            turns = size + revised
            if turns % 2:
                with pytest.raises(ValueError, match=rf"must be even.*got {size} \+ {revised}$"):
                    ReverseEnv(sampler, revised=revised / size)
            else:
                assert 2 * ReverseEnv(sampler, revised=revised / size).batch_size[0] == 3 * turns


# -- the policy ------------------------------------------------------------------------------------------


def log_probs_by_torch(policy, ids: list[int]) -> torch.Tensor:
    """(n, V) log-probabilities after each token of a row without padding, from torch's own blocks."""
    x = policy.token.weight[ids] + policy.position.weight[: len(ids)]
    width, hidden = x.shape[1], torch.ones(len(ids), len(ids)).triu(1).bool()
    for block in policy.blocks:
        layer = torch.nn.TransformerEncoderLayer(
            width, block.heads, 4 * width, dropout=0.0, activation="gelu", norm_first=True
        )
        parts = (layer.self_attn.out_proj, block.mix), (layer.linear1, block.up), (layer.linear2, block.down)
        norms = (layer.norm1, block.norm_attention), (layer.norm2, block.norm_perceptron)
        for theirs, ours in (*parts, *norms):
            theirs.load_state_dict(ours.state_dict())
        layer.self_attn.in_proj_weight.data, layer.self_attn.in_proj_bias.data = (
            block.qkv.weight.data,
            block.qkv.bias.data,
        )
        x = layer(x, src_mask=hidden)
    scores = torch.nn.functional.layer_norm(x, [width], policy.norm.weight, policy.norm.bias)
    scores = scores @ policy.head.weight.T
    scores[:, digits.PAD] = -torch.inf
    return scores.log_softmax(-1).detach()


@pytest.fixture
def policy():
    """Large random weights, so that all tokens have an effect on the next one."""
    from headrace.pipeline.reverse import DigitPolicy

    torch.manual_seed(2)
    made = DigitPolicy(width=6, heads=2, layers=2)
    for parameter in made.parameters():
        torch.nn.init.normal_(parameter)
    return made


@pytest.mark.torchrl
def test_a_policy_samples_until_the_end_and_has_the_log_probabilities_of_torchs_blocks(policy, monkeypatch):
    """Four prompts, two by two. Which tokens are sampled is given, and what follows an end is padding."""
    revised = digits.revision_prompts(digits.prompts()[[99]], tokens_of(["12."]))
    asked = [*digits.prompts()[[3, 17, 450]], *revised]
    given, seen = (
        torch.tensor([[1, 2, 3, 4], [digits.END, 5, 6, 7], [8, digits.END, 9, 0], [5, 6, 7, digits.END]]),
        [],
    )

    def sampled(chances, number):
        seen.append(chances)
        return given[:, len(seen) - 1 : len(seen)]

    monkeypatch.setattr(torch, "multinomial", sampled)
    rows = policy(TensorDict({("tokens", "prompt"): torch.stack(asked).view(2, 2, -1)}, [2, 2]))
    length = digits.PROMPT_LENGTH
    for number, (prompt, row) in enumerate(zip(asked, rows.flatten(), strict=True)):
        whole = given[number].tolist()
        answer = whole[: whole.index(digits.END) + 1] if digits.END in whole else whole
        padding = [digits.PAD] * (4 - len(answer))
        begins = [token for token in prompt.tolist() if token != digits.PAD]
        first, last = length - len(begins), length + len(answer)
        assert row["tokens", "response"].tolist() == answer + padding
        assert row["tokens", "full"].tolist() == prompt.tolist() + answer + padding
        everything = list(range(length + 4))
        assert row["masks", "all_attention_mask"].tolist() == [first <= at < last for at in everything]
        assert row["masks", "all_assistant_mask"].tolist() == [length <= at < last for at in everything]
        after = log_probs_by_torch(policy, [*begins, *answer])
        expected = torch.zeros(length + 4)
        for at, token in enumerate(answer):
            expected[length + at] = after[len(begins) - 1 + at, token]
            torch.testing.assert_close(seen[at][number].log(), after[len(begins) - 1 + at])
        torch.testing.assert_close(row["log_probs", "full"], expected)
        assert not row["log_probs", "full"].requires_grad
    batch = rows.flatten()
    inside = batch["masks", "all_assistant_mask"]
    for transform in (lambda batch: batch, pack, lambda batch: pack(batch, tree=True)):
        made = transform(batch)
        found = policy.get_dist(made).log_prob(made["tokens", "full"])[made["masks", "all_assistant_mask"]]
        torch.testing.assert_close(found.detach(), batch["log_probs", "full"][inside])


@pytest.mark.torchrl
def test_the_size_of_a_policy_by_hand():
    """Of the default width 64, the 14 tokens, 13 positions and the head, two blocks, and the last norm."""
    from headrace.pipeline.reverse import DigitPolicy

    block = (64 + 1) * 192 + (64 + 1) * 64 + (64 + 1) * 256 + (256 + 1) * 64 + 4 * 64
    count = (14 + 13 + 14) * 64 + 2 * block + 2 * 64
    assert sum(each.numel() for each in DigitPolicy().parameters()) == count
    assert len(DigitPolicy(width=1, heads=1, layers=1).blocks) == 1
    for options, said in (
        ({"width": 0}, "width must be an integer ≥ 1; got 0"),
        ({"heads": 0}, "heads must be an integer ≥ 1; got 0"),
        ({"layers": 0}, "layers must be an integer ≥ 1; got 0"),
        ({"width": 6, "heads": 4}, "width must be a multiple of heads; got 6 and 4"),
    ):
        with pytest.raises(ValueError, match=f"^{said}$"):
            DigitPolicy(**options)
