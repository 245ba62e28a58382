"""E1: how kernels are found in a compiled program, and when its target holds."""

import pytest

from benchmarks import e1_experts
from benchmarks.e1_experts import WORKS, Times
from benchmarks.e1_programs import RUN, kernels_in
from telamon.config.load import load_run

TPU = """\
  %gmm_v2-g_8-m_4096-k_256-act_None-n_384-tm_512-tk_256-tn_384.2 = bf16[4096,384] custom-call(%a), custom_call_target="tpu_custom_call", metadata={}
  %gmm_v2-g_8-m_4096-k_384-act_None-n_256-tm_512-tk_384-tn_256 = bf16[4096,256] custom-call(%a), custom_call_target="tpu_custom_call", metadata={}
  %lce_fwd_bt_1024_ht_256_vt_1024.1 = f32[] custom-call(%b), custom_call_target="tpu_custom_call", metadata={}
  %splash_mha_fwd_segmented_residuals.1 = bf16[] custom-call(%b), custom_call_target="tpu_custom_call", metadata={}
  %custom-call.4 = bf16[] custom-call(), custom_call_target="AllocateBuffer"
"""
GPU = """\
  %mpmd_map.3 = bf16[8] custom-call(%a), custom_call_target="mosaic_gpu_v2", metadata={op_name="jit(train_step)/while/body/ragged_dot_sm90/mpmd_map"}
  %mpmd_map.4 = bf16[8] custom-call(%a), custom_call_target="mosaic_gpu_v2", metadata={op_name="jit(train_step)/transpose(jvp())/mpmd_map"}
  %cudnn.1 = bf16[8] custom-call(%a), custom_call_target="__cudnn$fmhaScaleBiasSoftmax", metadata={op_name="jit(f)/dot_product_attention_fwd"}
  %cublas.1 = bf16[8] custom-call(%a), custom_call_target="__cublas$gemm", metadata={op_name="jit(f)/dot_general"}
"""


def test_kernels_are_counted_by_name():
    assert kernels_in(TPU) == {"gmm_v2": 2, "lce_fwd": 1, "splash_mha_fwd_segmented_residuals": 1}
    assert kernels_in(GPU) == {"__cudnn$fmhaScaleBiasSoftmax": 1, "mosaic_gpu_v2": 1, "ragged_dot_sm90": 1}


def test_the_widths_are_those_that_the_kernels_take():
    config = load_run(RUN).config
    sizes = config.model.model_dump()
    assert (config.train.compute_dtype, sizes["d_model"] % 128, sizes["d_ff"] % 128) == ("bfloat16", 0, 0)


@pytest.mark.parametrize(
    ("seconds", "kernels", "holds"), [(1.3, {"gmm_v2": 6}, True), (1.31, {"gmm_v2": 6}, False), (1.0, {"splash": 2}, False)], ids=str
)
def test_it_holds_where_the_first_layer_is_fast_enough_and_both_compilers_took_the_kernels(seconds: float, kernels: dict, holds: bool):
    """The ratio is the median of the rounds' own ratios: a round in which the machine was slow counts as any other."""
    times = {work: (Times([1.0, 4.0, 1.0], [2.0] * 3), Times([seconds, 4 * seconds, 9.0], [2.2] * 3)) for work in WORKS}
    found = {"v6e:1x1": {"picks": ["experts: tokamax"], "kernels": kernels}, "h100:1": {"picks": [], "kernels": {"ragged_dot_sm90": 6}}}
    result = e1_experts.result(times, found)
    assert result.holds is holds
    assert result.figures["of_dense"] == seconds
    assert result.figures["NVIDIA H100: ragged_dot_sm90"] == 6
    assert result.rows[0] == ["D 512, F 1024, bfloat16", "1000", f"{seconds * 4000:.0f}", f"{seconds:.2f}", "1.10"]
