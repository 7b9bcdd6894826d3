"""The NVFP4 number format: quantise, pack, multiply. Knows no model; imports nothing else of the package."""

from triage_jax.nvfp4.dot import Execution as Execution
from triage_jax.nvfp4.dot import quantized_dot as quantized_dot
from triage_jax.nvfp4.formats import e2m1_decode as e2m1_decode
from triage_jax.nvfp4.formats import e2m1_encode as e2m1_encode
from triage_jax.nvfp4.formats import e4m3_decode as e4m3_decode
from triage_jax.nvfp4.formats import e4m3_encode as e4m3_encode
from triage_jax.nvfp4.formats import pack as pack
from triage_jax.nvfp4.formats import unpack as unpack
from triage_jax.nvfp4.native import block_scaled_product as block_scaled_product
from triage_jax.nvfp4.operand import Operand as Operand
from triage_jax.nvfp4.operand import from_quantized as from_quantized
from triage_jax.nvfp4.operand import to_operand as to_operand
from triage_jax.nvfp4.quantize import QuantizedTensor as QuantizedTensor
from triage_jax.nvfp4.quantize import dequantize as dequantize
from triage_jax.nvfp4.quantize import quantize as quantize
from triage_jax.nvfp4.spec import DotRecipe as DotRecipe
from triage_jax.nvfp4.spec import ExpertScopes as ExpertScopes
from triage_jax.nvfp4.spec import QuantSpec as QuantSpec
