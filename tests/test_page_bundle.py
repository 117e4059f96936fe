"""JavaScript modules become one script: in order, each by itself, or not at all."""

from __future__ import annotations

import re

import pytest

from headrace.pipeline.report.html import bundle, read_modules

pytestmark = pytest.mark.slow

DIAMOND = {
    "page.js": 'import { left } from "./left.js";\nimport {\n  right,\n} from "./right.js";\nsay();\n',
    "left.js": 'import { base } from "./base.js";\n\nexport const left = 10 * base;\n',
    "right.js": 'import { base } from "./base.js";\n\nconst hidden = 100;\nexport function right() {}\n',
    "base.js": "export const base = 1;\n",
    "alone.js": "export const left = 0;\n",
}


def order_of(script: str) -> list[str]:
    return re.findall(r'^modules\["(\S+)"\] = ', script, re.M)


def test_a_module_comes_once_and_after_those_it_imports():
    assert order_of(bundle(DIAMOND, "page.js")) == ["base.js", "left.js", "right.js", "page.js"]
    backwards = dict(reversed(DIAMOND.items()))
    assert bundle(backwards, "page.js") == bundle(DIAMOND, "page.js")


def test_no_import_and_no_export_is_left_in_it():
    script = bundle(read_modules(), "page.js")
    assert not re.search(r"^\s*(import|export)\b", script, re.M)
    assert set(order_of(script)) == set(read_modules())


@pytest.mark.parametrize("second", ["const one = 2;", "function one() {}", "let one;", "class one {}"])
def test_one_name_in_two_modules_is_refused(second):
    first = "export const a = 1;\nconst one = a;\n"
    modules = {"page.js": f'import {{ a }} from "./a.js";\n{second}\n', "a.js": first}
    with pytest.raises(ValueError, match=r"^one is a name of the outermost level in a\.js and in page\.js"):
        bundle(modules, "page.js")
    with pytest.raises(ValueError, match=r"^modules is a name .* in the bundle and in page\.js"):
        bundle({"page.js": "const modules = 1;\n"}, "page.js")


@pytest.mark.parametrize(
    "line",
    [
        'import a from "./a.js";',
        'import * as a from "./a.js";',
        'import "./a.js";',
        "import { a } from './a.js';",
        'import { a } from "https://example.com/a.js";',
        "export default 1;",
        "export let a = 1;",
        "export { a };",
        'export * from "./a.js";',
        "var a = 1;",
        "const { a, b } = c;",
        "let [a] = c;",
        "function* a() {}",
    ],
)
def test_what_the_bundle_does_not_understand_is_refused(line):
    with pytest.raises(ValueError, match=rf"^page\.js must import as .* found: {re.escape(line)}$"):
        bundle({"page.js": f"f();\n{line}\n"}, "page.js")
