"""``task=xray`` measures the weights that other trainers document, and any deviations."""

from __future__ import annotations

import gc
import io
import json
import math
import re
import runpy
import sys
from dataclasses import FrozenInstanceError, replace
from importlib import import_module
from pathlib import Path

import foreign
import pytest
import torch
from command import headrace_here, refused, told
from composed import configure
from rich.console import Console
from small_openrlhf import LISTED, instead_of_openrlhf
from small_swift import instead_of_swift

from headrace.adapters import attach
from headrace.adapters import measured as measured_adapters
from headrace.pipeline import (
    ConfigError,
    TokenTable,
    load_pipeline,
    table_as_causal_lm,
    token_weights,
    trl_step,
    xray,
    xray_batch,
)
from headrace.pipeline.tools.xray import xray_page
from headrace.pipeline.tools.xray.means import StepTokens, TokenMean
from headrace.pipeline.tools.xray.measure import Measured, XRay
from headrace.pipeline.tools.xray.of_trl import word_tokenizer
from headrace.pipeline.tools.xray.page import EDGE, HEIGHT, TOP, WIDTH
from headrace.pipeline.tools.xray.setting import (
    ROWS_OF_STEP,
    SUM_OF_STEP,
    TOKENS_OF_STEP,
    MeasuredSetting,
    Setting,
    rounded,
)
from headrace.pipeline.tools.xray.token_table import ExplainedGradient
from headrace.pipeline.tools.xray.xray_task import measure_trainer, show_settings

pytestmark = [
    pytest.mark.slow,
    # transformers 5 warns of names that its own Trainer uses.
    pytest.mark.filterwarnings("ignore:`(is_)?gradient_checkpointing:FutureWarning"),
]
ROOT = Path(__file__).parents[3]
KEPT = json.loads((ROOT / "docs" / "xray.json").read_text())
LOSS_TYPES = {"dapo": TOKENS_OF_STEP, "grpo": ROWS_OF_STEP, "dr_grpo": SUM_OF_STEP}
MINE = """
def step(model, batch, cut):
    mask = batch["masks", "all_assistant_mask"]
    for part, inside in zip(batch.chunk(cut), mask.chunk(cut), strict=True):
        log_probs = model.get_dist(part).log_prob(part["tokens", "full"])
        terms = log_probs * part["advantage"].squeeze(-1) * inside
        (-terms.sum() / inside.sum() / cut).backward()
"""


def measured(folder: Path, *words: str) -> dict[str, dict]:
    """Run the command, and return the settings in its JSON by name."""
    headrace_here(folder, "task=xray", *words, "hydra.run.dir=out")
    assert "<svg" in (folder / "out" / "report.html").read_text()
    found = json.loads((folder / "out" / "xray.json").read_text())["settings"]
    return {each["setting"]: each for each in found}


def as_kept(found: dict[str, dict], trainer: str, version: str) -> None:
    """Check that the numbers are those of docs/xray.json for this version, up to float32's rounding."""
    kept = KEPT[trainer]
    if not kept["trainer"].endswith(f" {version}"):
        pytest.skip(f"docs/xray.json is of {kept['trainer']}, and here is {version}: run tools/make_xray.py")
    for each in kept["settings"]:
        mine = found[each["setting"]]
        for name in ("over_documented", "documented", "constant", "note"):
            assert mine[name] == pytest.approx(each[name], abs=2e-5), (each["setting"], name)
        for cut, bounds in each["over_one_micro_batch"].items():
            assert mine["over_one_micro_batch"][cut] == pytest.approx(bounds, abs=2e-5), each["setting"]


def test_the_page_equals_the_stored_numbers():
    make_xray = runpy.run_path(str(ROOT / "tools" / "make_xray.py"))
    page = (ROOT / "docs" / "xray.md").read_text()
    assert page == make_xray["page"](KEPT), "run tools/make_xray.py"


# What the trainers' losses divide by, as `unit` and `length` of LossWeight: 16 is the longest response.
MODES = {
    **dict.fromkeys(("dapo", "token-mean"), ("token", None)),
    **dict.fromkeys(("grpo", "seq-mean-token-mean"), ("sample", None)),
    **dict.fromkeys(("dr_grpo", "seq-mean-token-sum-norm"), ("constant", 16)),
}


@pytest.mark.parametrize("trainer", KEPT)
def test_the_settings_of_a_trainer_are_those_of_the_page(trainer, monkeypatch, tmp_path):
    """The settings of the adapters come last. A trainer that is not installed has a stand-in."""
    if trainer in ("trl", "torchrl"):
        pytest.importorskip(trainer, reason=f"{trainer} is not installed")
    if trainer not in ("verl", "torchrl"):
        pytest.importorskip("datasets", reason="the extra `llm` is not installed")
    foreign.verl_trainer(monkeypatch)
    foreign.verl_losses(monkeypatch)
    monkeypatch.delitem(sys.modules, "headrace.adapters.verl", raising=False)
    module = import_module(f"headrace.pipeline.tools.xray.of_{trainer}")
    with instead_of_openrlhf(tmp_path), instead_of_swift():
        settings = getattr(module, f"{trainer}_settings")()
        adapted = getattr(measured_adapters, f"recipes_in_{trainer}", list)()
    for each in adapted:
        stages, mode = each.pipeline.stages, re.search(r"loss_(?:type|agg_mode)=([\w-]+)", each.name)[1]
        assert (stages["weight"].unit, stages["weight"].length) == MODES[mode], each.name
        assert stages["split"].minibatches == 1
    settings += adapted
    kept = [
        (each["setting"], each["documented"], each["constant"], each["note"], bool(each["curve"]))
        for each in KEPT[trainer]["settings"]
    ]
    found = [(each.name, each.documented, rounded(each.constant), each.note, each.curve) for each in settings]
    assert found == kept
    sys.modules.pop("headrace.adapters.verl", None)


def test_a_curve_goes_from_the_least_to_the_greatest_ratio():
    """The horizontal axis has the logarithm of the ratio, and the vertical one begins at 0."""
    curve = {0.1: (0.1, 0.0), 1.0: (1.0, 1.0), 10.0: (2.0, 0.0), 100.0: (9.0, 3.0)}

    def step(model, batch, cut):
        terms = model.get_dist(batch).log_prob(batch["tokens", "full"]) * batch["advantage"].squeeze(-1)
        (-terms[batch["masks", "all_assistant_mask"]].sum()).backward()

    page = xray_page("a page", [MeasuredSetting("a setting", xray(step, cuts=(1,)), curve=curve)])
    lines = [
        [
            tuple(map(float, point.split(",")))
            for point in re.search(f'"{name}" points="([^"]*)"', page)[1].split()
        ]
        for name in ("up", "down")
    ]
    for line, values in zip(lines, zip(*curve.values(), strict=True), strict=True):
        across, down = zip(*line, strict=True)
        assert across == pytest.approx(
            [EDGE + share * (WIDTH - EDGE) for share in (0, 1 / 3, 2 / 3, 1)], abs=0.1
        )
        assert down == pytest.approx([HEIGHT * (1 - min(value, TOP) / TOP) for value in values], abs=0.1)
    assert (
        'aria-label="coefficient by ratio" width="270" height="168"><path class="axis" d="M20 0v150h250"/>'
        in page
    )
    assert re.findall(r'middle" x="[\d.]+" y="(\d+)"', page) == ["164"] * 5
    heights = re.findall(r'<text x="0" y="(\d+)">(\d)<', page)
    assert heights == [(f"{HEIGHT * (1 - value / 6) + 4:.0f}", f"{value}") for value in (0, 2, 4, 6)]
    ticks = re.findall(r'middle" x="([\d.]+)" y="\d+">([\d.e+]+)<', page)
    assert [float(ratio) for _, ratio in ticks] == [0.1, 0.2, 1.0, 5.1, 100.0]
    for across, ratio in ticks:
        share = (math.log10(float(ratio)) + 1) / 3
        assert float(across) == pytest.approx(EDGE + share * (WIDTH - EDGE), abs=0.1)


def test_the_colour_of_a_token_is_its_weight_over_the_documented_one():
    """The legend has nine colours. A square of another colour than the middle one says its weight.

    The last row has the mean reward of its group, so its advantage is 0, and its squares have no colour.
    """
    shares = [0.2, 0.3, 0.6, 0.85, 1.0, 1.1, 1.5, 3.0, 5.0]  # in this order, one for each colour

    def step(model, batch, cut):
        inside, factor = batch["masks", "all_assistant_mask"], torch.ones(batch["tokens", "full"].shape)
        for row, share in enumerate(shares):
            factor[row, inside[row].nonzero()[1]] = share
        terms = model.get_dist(batch).log_prob(batch["tokens", "full"]) * batch["advantage"].squeeze(-1)
        (-(terms * factor)[inside].sum() / inside.sum()).backward()

    rewards = (1.0, 0.0, 0.25, 0.5, 0.0, 1.0, 0.75, 0.1, 0.75, 0.75, 0.0, 0.5)
    found = xray(step, cuts=(1,), lengths=(3, 9, 5, 4, 8, 2, 6, 7, 5, 3, 11, 4), rewards=rewards)
    documented = MeasuredSetting("mine", found, TOKENS_OF_STEP, note="a note")
    page = xray_page("a page", [documented])
    assert f"Documented: {TOKENS_OF_STEP} (a note)" in page
    square = r'<rect class="c(\d)" x="(\d+)" y="(\d+)" width="11" height="11">'
    squares = re.findall(f"{square}<title>row (\\d+), token (\\d+): ([\\d.]+)</title></rect>", page)
    assert [tuple(map(float, each)) for each in squares] == [
        (row, 13 * 3, 13 * row, row, 3, share) for row, share in enumerate(shares) if share != 1
    ]
    (panel,) = re.findall(
        r'aria-label="1 micro-batch" width="(\d+)" height="(\d+)">(<path [^>]*><path [^>]*>)', page
    )
    inside = documented.xray.runs[0].tokens.inside
    usual = [(row, at) for row, at in inside.nonzero().tolist() if at != 3 or row in (4, 9, 10, 11)]
    drawn = [(row, at, f"M{13 * at} {13 * row}h11v11h-11z") for row, at in usual]
    paths = ["".join(d for row, _, d in drawn if (row == 11) == out) for out in (False, True)]
    assert panel == ("169", "156", f'<path class="c4" d="{paths[0]}"/><path class="out" d="{paths[1]}"/>')
    names = ["≤ ¼", "≤ ½", "≤ 0.8", "< 1", "1", "> 1", "> 1.25", "> 2", "> 4"]
    legend = "".join(
        f'<rect class="c{at}" x="{64 * at}" y="0" width="11" height="11"/>'
        f'<text x="{64 * at + 16}" y="10">{name}</text>'
        for at, name in enumerate(names)
    )
    assert f'aria-label="colours" width="576" height="11">{legend}</svg>' in page
    constant = xray_page("a page", [replace(documented, constant=2.0)])
    assert f"Documented: {TOKENS_OF_STEP}, times 2 (a note)" in constant


def test_a_line_for_each_setting_and_the_verdicts_that_differ_from_the_documentation_are_printed():
    """With three micro-batches, the step counts twice. A narrow window lacks the documented mean."""

    def step(model, batch, cut):
        terms = model.get_dist(batch).log_prob(batch["tokens", "full"]) * batch["advantage"].squeeze(-1)
        inside = batch["masks", "all_assistant_mask"]
        (-terms[inside].sum() * (1 + (cut == 3)) / inside.sum()).backward()

    found = MeasuredSetting("one", xray(step, cuts=(1, 2, 3)), TOKENS_OF_STEP, note="as said")
    same = MeasuredSetting("same", xray(step, cuts=(1, 2, 4)), TOKENS_OF_STEP, note="nothing")
    verdict = found.xray.verdict
    for width, settings, expected in (
        (
            90,
            [found, replace(found, name="two", documented="", note="")],
            f"""
a trainer: the weight of a token
                                                 measured /          2 / 1          3 / 1
setting  documented                              documented  micro-batches  micro-batches
─────────────────────────────────────────────────────────────────────────────────────────
one      mean over the tokens of the whole step      1 to 2              1              2
two      –                                           1 to 2              1              2
one: {verdict}. Its documentation: as said
two: {verdict}
""",
        ),
        (
            60,
            [same, replace(same, name="half", constant=2.0, note="")],
            f"""
a trainer: the weight of a token
         measured /          2 / 1          4 / 1
setting  documented  micro-batches  micro-batches
─────────────────────────────────────────────────
same              1              1              1
half            0.5              1              1
half: {same.xray.verdict}
""",
        ),
    ):
        console = Console(file=io.StringIO(), width=width)
        show_settings("a trainer", settings, console)
        assert console.file.getvalue() == expected


def test_a_share_is_unknown_where_the_documented_weight_is_0():
    """Each token has the coefficient 1. So it is documented, but for the tokens of the first row."""

    def step(model, batch, cut):
        batch["advantage"] = (torch.arange(len(batch)) > 0).double()[:, None, None]
        terms = model.get_dist(batch).log_prob(batch["tokens", "full"])
        (-terms[batch["masks", "all_assistant_mask"]].sum()).backward()

    found = MeasuredSetting("sum", xray(step, cuts=(1,)), SUM_OF_STEP, constant=12.0)
    share, inside = found.share(found.xray.runs[0]), found.xray.runs[0].tokens.inside
    assert torch.equal(share.isnan(), ~inside | (torch.arange(12) == 0)[:, None])
    assert found.over_documented() == pytest.approx((1.0, 1.0), abs=1e-12)


def test_measurements_cannot_be_changed():
    for kind in (ExplainedGradient, Measured, MeasuredSetting, Setting, StepTokens, TokenMean, XRay):
        with pytest.raises(FrozenInstanceError):
            object.__new__(kind).name = "another"


def close(bounds: list[float], value: float) -> bool:
    return bounds == pytest.approx([value, value], abs=1.1e-5)


def uniform(each: dict) -> bool:
    return all(close(bounds, 1.0) for bounds in each["over_one_micro_batch"].values())


# -- TorchRL ------------------------------------------------------------------------------------------------


@pytest.mark.torchrl
def test_torchrl_takes_its_documented_means_and_curves(tmp_path):
    import torchrl

    found = measured(tmp_path, "xray=torchrl", "xray.curve=false")
    assert len(found) == 15
    for name, each in found.items():
        assert close(each["over_documented"], 1.0), name
        assert uniform(each) == ("token_mean" not in name), name
    as_kept(found, "torchrl", torchrl.__version__)
    name = "DAPO(aggregation=token_mean), MCAdvantage"  # test_xray.py has the curves of other losses
    curve = measured(tmp_path, "xray=torchrl", f"xray.only='{name}'")[name]["curve"]
    assert len(curve) == 17
    for ratio, both in curve.items():
        r = float(ratio)
        expected = [r if r < 1.28 else 0.0, r if r > 0.8 else 0.0]
        assert both == pytest.approx(expected, rel=1e-3, abs=1e-5), ratio


# -- TRL ----------------------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def trl():
    pytest.importorskip("transformers", reason="the extra `llm` is not installed")
    trl = pytest.importorskip("trl", reason="TRL is not installed")
    assert trl.GRPOTrainer
    assert trl.RLOOTrainer
    gc.freeze()  # each TRL trainer collects garbage, which is slow with all modules loaded
    return trl


def test_trl_takes_its_documented_means_with_and_without_masked_completions(trl, tmp_path):
    found = measured(tmp_path, "xray=trl", "xray.curve=false")
    known = {"dapo": 1.0, "grpo": 1.0, "dr_grpo": 1.0, "bnpo": 1.0, "cispo": 0.2}
    for masked in ("", ", mask_truncated_completions"):
        for loss_type, factor in known.items():
            each = found[f"GRPOTrainer(loss_type={loss_type}{masked})"]
            assert list(each["over_one_micro_batch"]) == ["1", "2", "4"]
            assert close(each["over_documented"], factor), loss_type
            assert uniform(each) == (loss_type != "bnpo"), loss_type
        for name in ("GRPOTrainer(loss_type=cispo, epsilon_high=5.0", "RLOOTrainer(beta=0.0"):
            assert close(found[f"{name}{masked})"]["over_documented"], 1.0)
    low, high = found["GRPOTrainer(loss_type=bnpo)"]["over_one_micro_batch"]["4"]
    assert low < 0.75
    assert high > 1.875
    for name, each in found.items():
        assert "cispo" in name or close(each["over_documented"], 1.0), name
    as_kept(found, "trl", trl.__version__)


@pytest.fixture
def adapter(trl):
    class Attached(trl.GRPOTrainer):
        def __init__(self, *args, pipeline, **kwargs):
            super().__init__(*args, **kwargs)
            attach(self, pipeline)

    return Attached


@pytest.mark.parametrize(("loss_type", "masked"), [("dapo", False), ("grpo", True), ("dr_grpo", True)])
def test_the_trl_adapter_trains_trls_advantages_with_trls_weights(trl, adapter, loss_type, masked):
    options = {"loss_type": loss_type, "mask_truncated_completions": masked}
    step = trl_step(adapter, {"pipeline": load_pipeline("as/trl")}, **options)
    constant = 1 / 16 if loss_type == "dr_grpo" else 1.0
    setting = Setting("adapter", step, LOSS_TYPES[loss_type], constant, dtype=torch.float32)
    found = setting.measure((1, 2, 4))
    assert found.over_documented() == pytest.approx((1.0, 1.0), abs=1e-4)
    found.xray.assert_uniform()


def test_tool_tokens_and_left_padding_change_nothing_in_trl(trl, capfd):
    step = trl_step("GRPOTrainer", loss_type="dapo", scale_rewards=False)
    found = xray(step, pad=("left", "right"), holes=True, cuts=(1, 2), dtype=torch.float32)
    found.assert_uniform()
    assert found.verdict == "mean over the tokens of the whole step, in 4 of 4 runs"
    assert [run.tokens.micro.bincount().tolist() for run in found.runs] == [[12], [6, 6]] * 2
    assert capfd.readouterr() == ("", "")
    with pytest.raises(ValueError, match="must have equal sizes; got 12 rows for 5"):
        xray(step, cuts=(5,), dtype=torch.float32)


def test_trl_clips_the_ratios_of_a_policy_that_changed_since_sampling(trl):
    known = {
        "dapo": ({"epsilon_high": 0.28}, [0.5, 1.0, 1.25, 0.0], [0.0, 1.0, 1.25, 6.0]),
        "cispo": ({"epsilon_high": 5.0}, [0.5, 1.0, 1.25, 5.0], [0.5, 1.0, 1.25, 5.0]),
    }
    shifts = [-math.log(ratio) for ratio in (0.5, 1.0, 1.25, 6.0)]
    for loss_type, (options, ups, downs) in known.items():
        step = trl_step("GRPOTrainer", loss_type=loss_type, **options)
        curve = xray(step, cuts=(1,), shifts=shifts, dtype=torch.float32).curve()
        assert [up for up, _ in curve.values()] == pytest.approx(ups, abs=1e-5)
        assert [down for _, down in curve.values()] == pytest.approx(downs, abs=1e-5)


def test_trls_rloo_has_one_ratio_for_a_whole_response(trl):
    """At the ratio 1.01 of each token, a response of n tokens has 1.01ⁿ, which is not clipped."""
    step = trl_step("RLOOTrainer", beta=0.0)
    shifts = (0.0, -math.log(1.01))
    base, run = xray(step, cuts=(1,), shifts=shifts, dtype=torch.float32).runs
    inside = run.tokens.inside & (base.coefficient != 0)
    length = run.tokens.inside.sum(1, keepdim=True).expand(inside.shape)[inside]
    assert (run.coefficient / base.coefficient)[inside].tolist() == pytest.approx(
        (1.01**length).tolist(), rel=1e-4
    )


def test_each_token_is_a_word_of_the_tokenizer(trl):
    words = word_tokenizer(6)
    assert words.convert_tokens_to_ids(["5", "0", "3"]) == [5, 0, 3]
    assert (len(words), words.pad_token_id, words.eos_token_id, words.padding_side) == (6, 4, 5, "left")


def test_a_table_is_a_transformers_model(trl):
    """Its head is the identity, without a gradient. Padding and end token are the two unused tokens."""
    batch = xray_batch([2, 3], [0.0, 1.0], group_size=2)
    for dtype in (torch.float32, torch.float64):
        table = TokenTable.of(batch, dtype, seed=1)
        model, tokens, size = table_as_causal_lm(table), batch["tokens", "full"], table.vocabulary
        logits = model(input_ids=tokens, attention_mask=torch.ones_like(tokens)).logits
        assert torch.equal(logits, table(tokens))
        assert torch.equal(model(input_ids=tokens, logits_to_keep=2).logits, logits[:, -2:])
        assert torch.equal(model.base_model(input_ids=tokens).last_hidden_state, logits)
        assert torch.equal(model.get_output_embeddings().weight, torch.eye(size, dtype=dtype))
        assert [name for name, each in model.named_parameters() if each.requires_grad] == [
            "model.table.table"
        ]
        assert model.get_input_embeddings() is None
    names = [
        "vocab_size",
        "hidden_size",
        "pad_token_id",
        "eos_token_id",
        "tie_word_embeddings",
        "architectures",
    ]
    found = [getattr(model.config, name) for name in names]
    assert found == [size, size, size - 2, size - 1, False, ["TableForCausalLM"]]
    log_probs = logits.log_softmax(-1)[:, :-1].gather(-1, tokens[:, 1:, None]).squeeze(-1)
    inside = batch["masks", "all_assistant_mask"]
    (-3 * log_probs[inside[:, 1:]]).sum().backward()
    assert torch.allclose(token_weights(model, batch), 3.0 * inside.double(), rtol=1e-9)


# -- trainers that need other versions, if they are installed ------------------------------------------------


def test_verls_loss_gets_the_tokens_and_the_counts_that_its_engine_gives(monkeypatch):
    """If verl is not installed, its loss is a loop."""
    from headrace.pipeline.tools.xray.of_verl import verl_settings

    foreign.verl_losses(monkeypatch)
    settings = [each for each in verl_settings() if each.name.startswith("vanilla")]
    assert len(settings) == 5
    for each in settings:
        found = each.measure((1, 3), curve=False)
        assert found.over_documented() == pytest.approx((1.0, 1.0), abs=1e-5), each.name
        found.xray.assert_uniform()


def test_verl_takes_the_mean_of_each_loss_agg_mode_for_any_micro_batches(tmp_path):
    pytest.importorskip("verl", reason="verl is not installed")
    found = measured(tmp_path, "xray=verl")
    assert sum("vanilla" in name for name in found) == 5
    for name, each in found.items():
        if name.startswith("geo_mean"):  # the engine sums the means of four micro-batches
            assert close(each["over_one_micro_batch"]["4"], 4.0)
        else:
            assert close(each["over_documented"], 1.0), name
            assert uniform(each), name
    for ratio, (up, down) in found["vanilla, loss_agg_mode=token-mean"]["curve"].items():
        r = float(ratio)
        assert up == pytest.approx(r if r < 1.2 else 0.0, rel=1e-3, abs=1e-5)
        assert down == pytest.approx(r if 0.8 < r < 3.0 else 0.0, rel=1e-3, abs=1e-5)  # clip_ratio_c is 3


def test_openrlhfs_losses_get_the_denominators_of_the_window(tmp_path):
    """If OpenRLHF is not installed, a stand-in has its losses. The listings of its packages do not run."""
    from headrace.pipeline.tools.xray.of_openrlhf import openrlhf_settings

    with instead_of_openrlhf(tmp_path):
        settings = openrlhf_settings()
        assert not LISTED
        assert not [name for name in sys.modules if name.startswith(("openrlhf.models", "openrlhf.utils"))]
    for each in settings:
        found = each.measure((1, 3), curve=False)
        assert found.over_documented() == pytest.approx((1.0, 1.0), abs=1e-5), each.name
        found.xray.assert_uniform()


def test_ms_swifts_trainer_trains_the_documented_weights_of_its_own_advantages():
    """If ms-swift is not installed, a stand-in trains. Two steps of a generation batch share its tokens."""
    from headrace.pipeline.tools.xray.of_ms_swift import ms_swift_settings

    pytest.importorskip("datasets", reason="the extra `llm` is not installed")
    with instead_of_swift():
        for each in ms_swift_settings()[:5]:
            found = each.measure((1, 3) if "bnpo" in each.name else (3,), curve=False)
            factor = 0.5 if "steps_per_generation=2" in each.name else 1.0
            assert found.over_documented() == pytest.approx((factor, factor), abs=1e-5), each.name


@pytest.mark.filterwarnings("ignore::DeprecationWarning")  # openrlhf's imports warn
def test_openrlhf_normalizes_over_the_window_of_micro_batches(tmp_path):
    pytest.importorskip("openrlhf", reason="OpenRLHF is not installed")
    pytest.importorskip("deepspeed", reason="DeepSpeed is not installed")
    found = measured(tmp_path, "xray=openrlhf")
    lost = [name for name in found if name.endswith("dynamic_batch_enable=True, ds.zero_stage=2")]
    assert len(found) == 11
    assert len(lost) == 1
    for name, each in found.items():
        assert (close(each["over_documented"], 1.0) and uniform(each)) == (name not in lost), name


def test_ms_swift_takes_the_documented_mean_over_the_window(tmp_path):
    pytest.importorskip("swift.rlhf_trainers.grpo_trainer", reason="ms-swift is not installed")
    found = measured(tmp_path, "xray=ms_swift")
    for name, each in found.items():
        of_default = {"=cispo)": 0.2, "steps_per_generation=2 * gradient_accumulation_steps)": 0.5}
        factor = next((of_default[end] for end in of_default if name.endswith(end)), 1.0)
        assert close(each["over_documented"], factor), name
        assert uniform(each) == ("bnpo" not in name), name


# -- a step of the user -------------------------------------------------------------------------------------


def test_a_user_step_is_named_and_compared_with_a_recipe(tmp_path, monkeypatch):
    (tmp_path / "ownstep.py").write_text(MINE)
    monkeypatch.syspath_prepend(tmp_path)
    words = ["xray=mine", "source=ownstep:step"]
    (alone,) = measured(tmp_path, *words).values()
    assert alone["verdict"].startswith("mean over the tokens of each micro-batch: with 2 micro-batches")
    (against,) = measured(tmp_path, *words, "pipeline=dapo", "xray.cuts=[3]").values()
    assert "times the weight of the pipeline" in against["verdict"]
    assert not close(against["over_documented"], 1.0)


def test_the_files_have_all_numbers_and_the_greatest_difference_is_returned(tmp_path, monkeypatch):
    """The first group has a quarter of its weight in the recipe, and the others have 3/2 of it."""
    factor = "terms *= torch.where(part['group_id'] == 0, 0.25, 1.5)\n        (-terms.sum()"
    (tmp_path / "partstep.py").write_text("import torch\n" + MINE.replace("(-terms.sum()", factor))
    monkeypatch.syspath_prepend(tmp_path)
    words = ["xray=mine", "xray.source=partstep:step", "xray.cuts=[1]", "xray.curve=false", "pipeline=grpo"]
    words += ["pipeline.stages.weight.unit=token", "pipeline.stages.split.minibatches=1"]
    value, text = told(measure_trainer, configure("config", "task=xray", *words), tmp_path, words)
    assert value == pytest.approx(0.75)
    verdict = "tokens get 0.25 to 1.5 times the weight of the pipeline"
    setting = {
        "setting": "partstep:step",
        "documented": "the recipe's weights",
        "constant": 1.0,
        "over_documented": [0.25, 1.5],
        "over_one_micro_batch": {"1": [1.0, 1.0]},
        "verdict": f"not the weights of the pipeline: with 1 micro-batch, {verdict}",
        "note": "",
        "curve": {},
    }
    found = json.loads((tmp_path / "xray.json").read_text())
    assert found == {"trainer": "partstep:step", "micro_batches": [1], "settings": [setting]}
    assert f"partstep:step: {setting['verdict']}\n" in text
    assert "The weight of each token: partstep:step" in (tmp_path / "report.html").read_text()
    (tmp_path / "report.html").unlink()
    words += ["report.html=false", "xray.only=step"]
    told(measure_trainer, configure("config", "task=xray", *words), tmp_path, words)
    assert not (tmp_path / "report.html").exists()
    words[-1] = "xray.only=other"
    with pytest.raises(
        ConfigError, match=r"xray\.only=other matches no setting; the settings are partstep:step$"
    ):
        told(measure_trainer, configure("config", "task=xray", *words), tmp_path, words)


@pytest.mark.parametrize(
    ("source", "says"),
    [
        ("null", "xray=mine needs a step to measure: source=module:function"),
        ("json:__doc__", "must name a function(model, batch, cut)"),
        ("json:dumps", "xray=mine: json:dumps(model, batch, cut) raised TypeError"),
    ],
)
def test_an_error_of_a_user_step_is_one_paragraph(source, says, tmp_path):
    assert says in refused(tmp_path, "task=xray", "xray=mine", f"source={source}")


def test_a_missing_trainer_is_named_with_how_to_install_it(tmp_path, monkeypatch):
    monkeypatch.setattr("headrace.pipeline.tools.xray.xray_task.version_of", lambda package: None)
    assert "needs trl: pip install" in refused(tmp_path, "task=xray", "xray=trl")
