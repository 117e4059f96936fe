"""The modules of the page use only the syntax that can be bundled into one script."""

from __future__ import annotations

import re
from collections import Counter

import pytest

from headrace.pipeline.tools.report.html import EXPORT, IMPORT, bundle, read_modules

pytestmark = pytest.mark.slow

TOP_LEVEL = re.compile(r"^(?:export )?(?:async )?(?:function|const|let|class) (\w+)", re.M)
# Syntax that `bundle` would leave unchanged or not see.
OTHER = re.compile(r"^(?:import\b|export\b|(?:var|(?:const|let) [^\w]|function\*)).*", re.M)


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
