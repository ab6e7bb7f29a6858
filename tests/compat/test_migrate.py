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
from bitwright.compat.pytorch_quantization.tensor_quant import QuantDescriptor
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
        (13, "mqbench.nowhere.thing"),
        (14, "sparsebit.sparse.SparseModel"),
        (16, "use_fb_fake_quant"),
    ]
    assert "register_backend" in made.missing[0][2]
    assert migrate(made.text).changed == []
    with pytest.raises(ConfigError, match=r"a.py:2: this is not Python"):
        migrate("x = 1\ny = (", "a.py")


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
