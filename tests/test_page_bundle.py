"""JavaScript modules become one script: in order, each by itself, or not at all."""

from __future__ import annotations

import json
import re
import shutil
import subprocess

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


def test_a_circle_is_refused_and_shown():
    modules = {
        "page.js": 'import { a } from "./a.js";\n',
        "a.js": 'import { b } from "./b.js";\nexport const a = b;\n',
        "b.js": 'import { a } from "./a.js";\nexport const b = a;\n',
    }
    with pytest.raises(ValueError, match=r"in a circle; found: a\.js -> b\.js -> a\.js$"):
        bundle(modules, "page.js")


def test_a_module_that_does_not_exist_is_named():
    with pytest.raises(ValueError, match=r"^page\.js needs the module gone\.js; there are page\.js$"):
        bundle({"page.js": 'import { a } from "./gone.js";\n'}, "page.js")


def test_a_name_that_is_not_exported_is_named():
    modules = {"page.js": 'import { a, b } from "./a.js";\n', "a.js": "export const a = 1;\nconst b = 2;\n"}
    with pytest.raises(ValueError, match=r"^page\.js imports b from a\.js, which exports a$"):
        bundle(modules, "page.js")


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


@pytest.mark.skipif(not shutil.which("node"), reason="needs node")
def test_a_module_sees_what_it_imports_and_nothing_else():
    modules = DIAMOND | {
        "page.js": 'import { left } from "./left.js";\nimport { right } from "./right.js";\n'
        "console.log(JSON.stringify([left, typeof right, typeof base, typeof hidden]));\n"
    }
    script = bundle(modules, "page.js")
    done = subprocess.run(["node", "-e", script], capture_output=True, text=True, timeout=60, check=True)
    assert json.loads(done.stdout) == [10, "function", "undefined", "undefined"]
