"""JavaScript modules are bundled into one script, and the page's modules use only supported syntax."""

from __future__ import annotations

import json
import re
import shutil
import subprocess
from collections import Counter

import pytest

from headrace.pipeline.report.html import EXPORT, IMPORT, bundle, read_modules

pytestmark = pytest.mark.slow

DIAMOND = {
    "page.js": 'import { left } from "./left.js";\nimport {\n  right,\n} from "./right.js";\nsay();\n',
    "left.js": 'import { base } from "./base.js";\n\nexport const left = 10 * base;\n',
    "right.js": 'import { base } from "./base.js";\n\nconst hidden = 100;\nexport function right() {}\n',
    "base.js": "export const base = 1;\n",
}
TOP_LEVEL = re.compile(r"^(?:export )?(?:async )?(?:function|const|let|class) (\w+)", re.M)
# What `bundle` would leave as it is, or would not see.
OTHER = re.compile(r"^(?:import\b|export\b|(?:var|(?:const|let) [^\w]|function\*)).*", re.M)


def order_of(script: str) -> list[str]:
    return re.findall(r'^modules\["(\S+)"\] = ', script, re.M)


def test_a_module_comes_once_and_after_its_imports():
    assert order_of(bundle(DIAMOND)) == ["base.js", "left.js", "right.js", "page.js"]
    backwards = dict(reversed(DIAMOND.items()))
    assert bundle(backwards) == bundle(DIAMOND)


def test_the_bundle_has_all_modules_and_no_import_or_export():
    script = bundle(read_modules())
    assert not re.search(r"^\s*(import|export)\b", script, re.M)
    assert set(order_of(script)) == set(read_modules())


def test_a_cycle_of_imports_is_refused_and_shown():
    modules = {
        "page.js": 'import { a } from "./a.js";\n',
        "a.js": 'import { b } from "./b.js";\nexport const a = b;\n',
        "b.js": 'import { a } from "./a.js";\nexport const b = a;\n',
    }
    with pytest.raises(ValueError, match=r"in a cycle.*a\.js.*b\.js"):
        bundle(modules)


def test_each_module_uses_syntax_that_the_bundle_supports():
    modules = read_modules()
    for name, text in modules.items():
        assert OTHER.findall(EXPORT.sub(r"\1", IMPORT.sub("", text))) == [], name
        for braces, source in IMPORT.findall(text):
            names = {word.strip() for word in braces.strip("{}").split(",")} - {""}
            assert names <= {word for _, word in EXPORT.findall(modules[source])}, (name, source)


def test_a_top_level_name_is_defined_once_in_the_bundle():
    names = Counter(word for text in read_modules().values() for word in TOP_LEVEL.findall(text))
    assert [name for name, count in names.items() if count > 1 or name == "modules"] == []


@pytest.mark.skipif(not shutil.which("node"), reason="needs node")
def test_a_module_sees_only_its_imports():
    modules = DIAMOND | {
        "page.js": 'import { left } from "./left.js";\nimport { right } from "./right.js";\n'
        "console.log(JSON.stringify([left, typeof right, typeof base, typeof hidden]));\n"
    }
    script = bundle(modules)
    done = subprocess.run(["node", "-e", script], capture_output=True, text=True, timeout=60, check=True)
    assert json.loads(done.stdout) == [10, "function", "undefined", "undefined"]
