"""QuanTransformer: model transformers, the configs they read, and the QAT layers under their familiar names."""

from bitwright.compat.attributes import ConfigDict
from bitwright.compat.quantrans.builder import QUANTRANSFORMERS, build_mtransformer
from bitwright.compat.quantrans.config import Config
from bitwright.compat.quantrans.quantops import *
from bitwright.compat.quantrans.transformer import Basemtransformer, QuanTransformer, mTransformerV2
from bitwright.compat.quantrans.translate import to_recipe
