"""``bitwright migrate``: imports are changed, what is missing is listed, and nothing else is touched."""

import subprocess
import sys

import pytest

from bitwright.cli import main
from bitwright.compat.migrate import migrate
from bitwright.errors import ConfigError

SCRIPT = '''#!/usr/bin/env python
"""mqbench in a docstring stays."""
import os, mqbench.utils.state
import pytorch_quantization
from pytorch_quantization import nn as quant_nn, quant_modules
from pytorch_quantization.tensor_quant import (
    QuantDescriptor,  # a comment
)
import sparsebit.quantization as sq
try: from quantrans import build_mtransformer
except ImportError: build_mtransformer = None
from mqbench.utils.registry import register_model_quantizer
from mqbench.nowhere import thing
from sparsebit.sparse import SparseModel
from .mqbench import local
quant_nn.TensorQuantizer.use_fb_fake_quant = True
text = "from mqbench import x"; é = 1
'''


def test_imports_are_changed_and_nothing_else():
    made = migrate(SCRIPT)
    assert (
        made.text
        == '''#!/usr/bin/env python
"""mqbench in a docstring stays."""
import os; import bitwright.compat.mqbench.utils.state; from bitwright.compat import mqbench
from bitwright.compat import pytorch_quantization
from bitwright.compat.pytorch_quantization import nn as quant_nn, quant_modules
from bitwright.compat.pytorch_quantization.tensor_quant import (
    QuantDescriptor,  # a comment
)
import bitwright.compat.sparsebit.quantization as sq
try: from bitwright.compat.quantrans import build_mtransformer
except ImportError: build_mtransformer = None
from bitwright.compat.mqbench.utils.registry import register_model_quantizer
from bitwright.compat.mqbench.nowhere import thing
from bitwright.compat.sparsebit.sparse import SparseModel
from .mqbench import local
quant_nn.TensorQuantizer.use_fb_fake_quant = True
text = "from mqbench import x"; é = 1
'''
    )
    assert [number for number, _ in made.changed] == [3, 4, 5, 6, 9, 10, 12, 13, 14]
    assert [(number, what) for number, what, _ in made.missing] == [
        (12, "mqbench.utils.registry.register_model_quantizer"),
        (13, "mqbench.nowhere"),
        (14, "sparsebit.sparse.SparseModel"),
    ]
    assert "register_backend" in made.missing[0][2]
    assert migrate(made.text).changed == []
    with pytest.raises(ConfigError, match=r"a.py:2: this is not Python"):
        migrate("x = 1\ny = (", "a.py")


_B = "bitwright.compat"


@pytest.mark.parametrize(
    ("old", "new"),
    [
        ("import mqbench; import sparsebit", f"from {_B} import mqbench; from {_B} import sparsebit"),
        ("x = '\x0c'\n\x0cimport mqbench\n", f"x = '\x0c'\n\x0cfrom {_B} import mqbench\n"),
        ('s = """\u2028\x1c"""\nimport mqbench', f's = """\u2028\x1c"""\nfrom {_B} import mqbench'),
        ("a = 1\r\nfrom mqbench import (\r\n  nn,\r\n)\r\n", f"a = 1\r\nfrom {_B}.mqbench import (\r\n  nn,\r\n)\r\n"),
        ("a = 1\rfrom mqbench import nn\r", f"a = 1\rfrom {_B}.mqbench import nn\r"),
        ("from \\\n  mqbench . utils import state # é", f"from \\\n  {_B}.mqbench . utils import state # é"),
        ("é = 1; from mqbench import nn; è = 2", f"é = 1; from {_B}.mqbench import nn; è = 2"),
        (
            "from mqbench import (nn, # one\n  utils); from mqbench.utils import state as s",
            f"from {_B}.mqbench import (nn, # one\n  utils); from {_B}.mqbench.utils import state as s",
        ),
        ("from mqbench.observer import *\n", f"from {_B}.mqbench.observer import *\n"),
        ("def f():\n\tif 1: import mqbench.nn as n\n", f"def f():\n\tif 1: import {_B}.mqbench.nn as n\n"),
        (
            "import os, mqbench as m, \\\n  sparsebit.quantization\n",
            f"import os; import {_B}.mqbench as m; import {_B}.sparsebit.quantization; from {_B} import sparsebit\n",
        ),
        ("from .mqbench import a\nfrom . import mqbench\nimport mqbenchmark\n", None),
        ("'from mqbench import x'\nmqbench = 'mqbench'\n# import mqbench\n", None),
        ("", None),
    ],
)
def test_nothing_else_changes_in_odd_scripts(old, new):
    made = migrate(old)
    assert made.text == (old if new is None else new)
    assert bool(made.changed) == (new is not None)
    assert made.missing == []
    compile(made.text, "new", "exec")


def test_names_that_are_used_later_and_paths_in_text_are_listed():
    script = """import mqbench.utils.registry as registry
from pytorch_quantization import nn as quant_nn, calib
import sparsebit
model = importlib.import_module("mqbench.convert_deploy")
registry.register_convert_function(f)
quant_nn.QuantFoo(quant_nn.QuantLinear.default_quant_desc_input.bits)
sparsebit.quantization.modules.python_builtins.QEqual, quant_nn.functional.clip
def f(calib):
    return calib.nowhere
from mqbench.nothing import *
"""
    found = [(line, what) for line, what, _ in migrate(script).missing]
    assert found == [
        (4, "'mqbench.convert_deploy'"),
        (5, "mqbench.utils.registry.register_convert_function"),
        (6, "pytorch_quantization.nn.QuantFoo"),
        (7, "sparsebit.quantization.modules.python_builtins.QEqual"),
        (10, "mqbench.nothing"),
    ]


@pytest.mark.parametrize(
    ("text", "said"),
    [
        ("x = 1\0", "null bytes"),
        ("(" * 500, "not Python|nested too deeply"),
        ("-" * 90000 + "1", "not Python|nested too deeply"),
        ("print 'old'", r"a.py:1: this is not Python"),
    ],
)
def test_scripts_that_are_refused(text, said):
    with pytest.raises(ConfigError, match=said):
        migrate(text, "a.py")


@pytest.mark.parametrize("encoding", ["latin-1", "cp1251", "utf-8-sig"])
def test_the_encoding_of_a_file_stays(tmp_path, encoding):
    word = {"latin-1": "é", "cp1251": "Ж", "utf-8-sig": "é"}[encoding]
    cookie = "" if encoding == "utf-8-sig" else f"# -*- coding: {encoding} -*-\n"
    script, link = tmp_path / "old.py", tmp_path / "link.py"
    script.write_bytes(f"{cookie}from mqbench import nn  # {word}\n".encode(encoding))
    link.symlink_to(script)
    assert main(["migrate", str(link), "--write"]) == 0
    assert link.is_symlink()
    assert script.read_bytes() == f"{cookie}from {_B}.mqbench import nn  # {word}\n".encode(encoding)


def test_files_that_are_refused_change_nothing(tmp_path, capsys):
    good = tmp_path / "good.py"
    good.write_text("import mqbench\n")
    wrong = {
        "latin.py": (b"x = '\xe9'\n", "cannot be read"),
        "unknown.py": (b"# coding: klingon\n", "cannot be read: unknown encoding"),
        "odd.py": (b"# coding: utf-7\nx = '+AGEAYg-'\n", "its bytes are not those that utf-7 writes"),
        "book.ipynb": (b"{}", "is a notebook: save it as a script first"),
        "two.py": (b"print 'old'", "this is not Python"),
    }
    for name, (content, said) in wrong.items():
        path = tmp_path / name
        path.write_bytes(content)
        assert main(["migrate", str(good), str(path), "--write"]) == 2
        assert said in " ".join(capsys.readouterr().err.split())
        assert path.read_bytes() == content
    assert main(["migrate", str(tmp_path), "--write"]) == 2
    assert "is not a file: name scripts, as in" in " ".join(capsys.readouterr().err.split())
    assert good.read_text() == "import mqbench\n"


def test_the_command(tmp_path, capsys):
    script = tmp_path / "train.py"
    script.write_text(
        "import mqbench\nfrom mqbench.observer import MSEObserver\nprint(mqbench.BackendType.NNIE.value)\n"
    )
    script.chmod(0o755)
    before = script.read_bytes()
    assert main(["migrate", str(script)]) == 0
    told = capsys.readouterr().out
    assert "2 imports to change" in told
    assert "2: from bitwright.compat.mqbench.observer import MSEObserver" in told
    assert script.read_bytes() == before
    assert main(["migrate", str(script), "--write"]) == 0
    assert script.stat().st_mode & 0o777 == 0o755
    ran = subprocess.run([sys.executable, str(script)], capture_output=True, text=True, check=True)
    assert ran.stdout == "nnie\n"
    assert main(["migrate", str(tmp_path / "none.py")]) == 2
    assert "cannot be read" in capsys.readouterr().err
