"""The tests that are nearest to a module: files with its name, in the folder that mirrors its folder."""

from __future__ import annotations

from pathlib import Path

ROOT = Path(__file__).parents[2]
TESTS = ROOT / "tests"
# Modules of the core and its extensions without a test file of their own, each with the file that tests it.
TESTED_ELSEWHERE = {
    "pipeline/account_keys": "house/test_options_are_set.py",
    "pipeline/callables": "pipeline/test_stage_foreign.py",
    "pipeline/collect/reading": "collect/test_assembling.py",
    "pipeline/composing/recipe_names": "pipeline/test_load_keywords.py",
    "pipeline/conversations": "tools/report/test_texts.py",
    "pipeline/error_overrides": "tools/command/test_arguments_mistakes.py",
    "pipeline/halves": "stages/test_weight_any_buffer.py",
    "pipeline/main": "tools/command/test_command.py",
    "pipeline/report_notes": "tools/report/test_report.py",
    "pipeline/reverse/digits": "train/test_reverse_digits.py",
    "pipeline/reverse/env": "train/test_reverse_digits.py",
    "pipeline/reverse/policy": "train/test_reverse_digits.py",
    "pipeline/train/token_loss": "train/test_optimiser_steps_of_grpo_loss.py",
    "pipeline/wording": "tools/dumps/test_untrusted_files.py",
    "transforms/carry/memory": "carry/test_resume.py",
    "transforms/split/permuted": "split/test_split.py",
    "transforms/split/shuffle": "split/test_split.py",
    "transforms/stages/advantage/reshape_formula": "stages/test_group_relative.py",
    "transforms/stages/advantage/states": "stages/test_by_turn.py",
    "transforms/stages/advantage/token_terms": "stages/test_by_token.py",
    "transforms/stages/correction/diverged": "stages/test_correction.py",
    "transforms/stages/correction/importance": "stages/test_correction.py",
    "transforms/stages/correction/ratios": "stages/test_correction.py",
    "transforms/stages/correction/token_filter": "stages/test_correction.py",
    "transforms/stages/sequences/words": "trees/test_forest.py",
    "transforms/streams/open_groups": "streams/test_assembler.py",
    "transforms/streams/pieces": "streams/test_assembler.py",
    "transforms/table/alone": "ranks/test_barrier.py",
    "transforms/table/checks": "stages/test_contract.py",
    "transforms/table/columns": "table/test_stage_laws.py",
    "transforms/table/labels": "table/test_entry_labels.py",
    "transforms/table/schema": "stages/test_contract.py",
    "transforms/trees/prefixes": "trees/test_forest.py",
}


def place_of(module: Path) -> Path:
    """The folder of tests that mirrors the folder of a module. `composing` is tested with the chain."""
    folders = [name for name in module.parts[1:-1] if name != "composing"]
    return TESTS / (folders[0] if folders else "pipeline")


def file_of(module: Path) -> str:
    """The beginning of the names of a module's test files. A module `stage` has the name of its folder."""
    is_family = module.stem == "stage" and module.parent.name not in ("table", "pipeline")
    return f"test_{module.parent.name if is_family else module.stem}"


def nearest_tests(module: str) -> list[str]:
    """The test files, or the folder of tests, nearest to a module, relative to the root."""
    path = Path(module)
    if elsewhere := TESTED_ELSEWHERE.get(str(path.with_suffix(""))):
        return [f"tests/{elsewhere}"]
    folders = [name for name in path.parts[:-1] if name not in ("transforms", "pipeline")]
    homes = [TESTS.joinpath(*folders[:count]) for count in range(len(folders), 0, -1)]
    home = next(each for each in (*homes, place_of(path), TESTS / "pipeline") if any(each.glob("test_*.py")))
    for name in (file_of(path), *(f"test_{folder}" for folder in reversed(folders))):
        if found := sorted(home.glob(f"{name}*.py")):
            return [str(each.relative_to(ROOT)) for each in found]
    return [str(home.relative_to(ROOT))]
