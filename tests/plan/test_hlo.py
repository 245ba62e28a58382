"""Counting in compiled programs: forms of text written by hand, and whole programs whose FLOPs and collectives a formula gives."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import Mesh, NamedSharding, PartitionSpec

from telamon.plan.hlo import Collective, count_program

_AXES = {"data": 2, "fsdp": 4}


def _program(*lines: str, before: str = "", partitions: int = 8, across: dict[str, int] | None = None):
    """Counts of a program whose entry computation has these instructions."""
    body = "\n".join(f"  {line}" for line in lines)
    text = f"HloModule test, is_scheduled=true, num_partitions={partitions}\n\n{before}\nENTRY %main (x: f32[8]) -> f32[8] {{\n{body}\n}}\n"
    return count_program(text, _AXES, across=across)


_X = "%x = f32[8,128]{1,0:T(8,128)S(1)} parameter(0)"


@pytest.mark.parametrize(
    ("groups", "axis", "size"),
    [
        ("replica_groups=mesh['data'=2,'fsdp'=4] {'fsdp'}", "fsdp", 4),
        ("replica_groups=mesh['axis_0'=2,'axis_1'=4] {'axis_0'}", "data", 2),
        ("replica_groups=mesh['axis_0'=8] {'axis_0'}", "data+fsdp", 8),
        ("replica_groups=mesh['axis_0'=8] {'axis_0':(1)2}", "data", 2),
        ("replica_groups=mesh['axis_0'=8] {'axis_0':(2)2}", "fsdp", 2),  # half of fsdp
        ("replica_groups=mesh['a'=4,'b'=2], device_ids=([4,2]<=[2,4]T(1,0)) {'b'}", "data", 2),
        ("replica_groups=mesh['a'=4,'b'=2], device_ids=(0,4,1,5,2,6,3,7) {'a'}", "fsdp", 4),
        ("replica_groups=[2,4]<=[8]", "fsdp", 4),
        ("replica_groups=[4,2]<=[2,4]T(1,0)", "data", 2),
        ("replica_groups={{0,1,2,3},{4,5,6,7}}", "fsdp", 4),
        ("replica_groups={{0,4},{1,5},{2,6},{3,7}}", "data", 2),
        ("replica_groups={}", "data+fsdp", 8),
    ],
)
def test_the_axis_of_a_collective_is_that_of_its_groups_however_they_are_written(groups, axis, size):
    """Devices stand in the mesh as 0 1 2 3 / 4 5 6 7: data goes down, fsdp across."""
    found = _program(_X, f"ROOT %g = f32[8,512] all-gather(%x), channel_id=1, {groups}, dimensions={{1}}, use_global_device_ids=true")
    assert found.collectives == (Collective("all-gather", axis, 8 * 128 * 4 * size, 1),)


@pytest.mark.parametrize(
    ("pairs", "axis"),
    [("{{0,1},{1,2},{2,3},{3,0},{4,5},{5,6},{6,7},{7,4}}", "fsdp"), ("{{0,4},{4,0},{1,5},{5,1}}", "data"), ("{{0,7},{7,0}}", "data+fsdp")],
)
def test_a_permute_counts_what_it_sends_along_the_axis_that_it_moves_on(pairs, axis):
    found = _program(
        _X,
        f"%p = (f32[8,128]{{1,0}}, f32[8,128]{{1,0}}, u32[], u32[]) collective-permute-start(%x), channel_id=3, source_target_pairs={pairs}, "
        'frontend_attributes={is_spmd_generated="true"}',
        "ROOT %d = f32[8,128]{1,0} collective-permute-done(%p)",
    )
    assert found.collectives == (Collective("collective-permute", axis, 8 * 128 * 4, 1),)


def test_collectives_count_once_whether_they_start_alone_or_in_a_wrapper():
    """Several arrays in one call, a call that starts and ends, a wrapper that runs it elsewhere, and groups of one device."""
    wrapper = """%sum (a: f32[], b: f32[]) -> f32[] {
  %a = f32[] parameter(0)
  %b = f32[] parameter(1)
  ROOT %add = f32[] add(%a, %b)
}

%async_computation (p: f32[8,128]) -> f32[1,128] {
  %p = f32[8,128]{1,0} parameter(0)
  ROOT %s = f32[1,128]{1,0} reduce-scatter(%p), channel_id=5, replica_groups=[1,8]<=[8], dimensions={0}, to_apply=%sum
}
"""
    found = _program(
        _X,
        "%y = bf16[100]{0} parameter(1)",
        "%r = ((f32[8,128], bf16[100]), (f32[8,128], bf16[100])) all-reduce-start(%x, %y), replica_groups={{0,1,2,3},{4,5,6,7}}, to_apply=%sum",
        "%rd = (f32[8,128]{1,0}, /*index=1*/bf16[100]{0}) all-reduce-done(%r)",
        "%s = ((f32[8,128]), f32[1,128], s32[]) async-start(%x), calls=%async_computation",
        "%sd = f32[1,128]{1,0} async-done(%s), calls=%async_computation",
        "%t = f32[8,128] all-to-all(%x), replica_groups={{0,4},{1,5},{2,6},{3,7}}, dimensions={0}",
        "ROOT %alone = f32[8,128] all-reduce(%x), replica_groups={{0},{1},{2},{3},{4},{5},{6},{7}}, to_apply=%sum",
        before=wrapper,
    )
    assert found.collectives == (
        Collective("all-reduce", "fsdp", 8 * 128 * 4 + 200, 1),
        Collective("all-to-all", "data", 8 * 128 * 4, 1),
        Collective("reduce-scatter", "data+fsdp", 8 * 128 * 4, 1),
    )


def test_a_ragged_exchange_counts_what_it_may_send_and_not_what_it_writes_into():
    found = _program(
        _X,
        "%into = f32[16,128] parameter(1)",
        "%n = s32[2] parameter(2)",
        "ROOT %r = f32[16,128] ragged-all-to-all(%x, %into, %n, %n, %n, %n), replica_groups={{0,4},{1,5},{2,6},{3,7}}",
    )
    assert found.collectives == (Collective("ragged-all-to-all", "data", 8 * 128 * 4, 1),)


@pytest.mark.parametrize(("groups", "axis"), [("{{0,1},{2,3}}", "fsdp"), ("{{0,2},{1,3}}", "data")])
def test_devices_of_a_slice_are_numbered_within_it(groups, axis):
    """Where fsdp crosses two slices, a slice is 2 x 2: data and the half of fsdp."""
    across = {"data": 1, "fsdp": 2}
    found = _program(_X, f"ROOT %r = f32[8,128] all-reduce(%x), replica_groups={groups}, to_apply=%add", partitions=4, across=across)
    assert found.collectives == (Collective("all-reduce", axis, 8 * 128 * 4, 1),)


_SPREAD = """%start (p: bf16[8]) -> (bf16[8], bf16[32], s32[2]) {
  %p = bf16[8] parameter(0)
  %g.1 = bf16[32] all-gather(%p), channel_id=9, replica_groups=[2,4]<=[8], backend_config={"async_collective_fusion_config":{"flag_start":"-1"}}
  ROOT %c.1 = (bf16[8], bf16[32], s32[2]) custom-call(%g.1), custom_call_target="AsyncCollectiveStart"
}

%during (p: bf16[8], a: bf16[32,16]) -> bf16[32,32] {
  %p = bf16[8] parameter(0)
  %a = bf16[32,16] parameter(1)
  %g.2 = bf16[32] all-gather(%p), channel_id=9, replica_groups=[2,4]<=[8], backend_config={"async_collective_fusion_config":{"flag_start":"2"}}
  ROOT %d = bf16[32,32] dot(%a, %a), lhs_contracting_dims={1}, rhs_contracting_dims={1}
}

%done (p: bf16[8]) -> bf16[32] {
  %p = bf16[8] parameter(0)
  %g.3 = bf16[32] all-gather(%p), channel_id=9, replica_groups=[2,4]<=[8], backend_config={"async_collective_fusion_config":{"flag_start":"2"}}
  ROOT %c.3 = bf16[32] custom-call(%p, %g.3), custom_call_target="AsyncCollectiveDone"
}

%all-reduce-scatter.3 (p: f32[32,8]) -> f32[8,8] {
  %p = f32[32,8] parameter(0)
  %r = f32[32,8] all-reduce(%p), channel_id=1, replica_groups=[2,4]<=[8], use_global_device_ids=true, to_apply=%add
  %zero = u32[] constant(0)
  ROOT %s = f32[8,8] dynamic-slice(%r, %zero, %zero), dynamic_slice_sizes={8,8}
}
"""


def test_what_a_tpu_does_in_fusions_counts_once_and_as_what_it_is():
    """A gathering that goes on while a product is made, which the text writes into each of the fusions, and a sum of which each device keeps a part."""
    found = _program(
        "%p = bf16[8] parameter(0)",
        "%a = bf16[32,16] parameter(1)",
        "%b = f32[32,8] parameter(2)",
        "%async-collective-start = (bf16[8], bf16[32], s32[2]) fusion(%p), kind=kCustom, calls=%start",
        "%product = bf16[32,32] fusion(%p, %a), kind=kOutput, calls=%during",
        "%async-collective-done = bf16[32] fusion(%p), kind=kCustom, calls=%done",
        "ROOT %part = f32[8,8] fusion(%b), kind=kCustom, calls=%all-reduce-scatter.3",
        before=_SPREAD,
    )
    assert found.collectives == (Collective("reduce-scatter", "fsdp", 32 * 8 * 4, 1), Collective("all-gather", "fsdp", 32 * 2, 1))
    assert found.flops == 2 * 32 * 32 * 16


def test_what_sparse_cores_do_for_a_tpu_counts():
    scatter = (
        "reduce-scatter(%a), channel_id=2, replica_groups={{0,1,2,3},{4,5,6,7}}, use_global_device_ids=true, dimensions={0}, to_apply=%add"
    )
    before = (
        "%add (l: f32[], r: f32[]) -> f32[] {\n  %l = f32[] parameter(0)\n  %r = f32[] parameter(1)\n  ROOT %s = f32[] add(%l, %r)\n}\n\n"
        f"%sc (a: f32[8,128]) -> f32[2,128] {{\n  %a = f32[8,128] parameter(0)\n  ROOT %rs = f32[2,128] {scatter}\n}}\n"
    )
    found = _program(
        _X,
        '%s = ((), (), (s32[8])) custom-call-start(), async_execution_thread="sparsecore", custom_call_target="later", called_computations={%sc}',
        "%u = ((f32[8,128]), f32[2,128], (s32[8])) custom-call-update(%s, %x)",
        "ROOT %d = f32[2,128]{1,0} custom-call-done(%u)",
        before=before,
    )
    assert found.collectives == (Collective("reduce-scatter", "fsdp", 8 * 128 * 4, 1),)


def test_slices_talk_through_their_hosts_and_number_their_own_devices():
    """Data crosses two slices of four; within a slice its devices are 0 to 3."""
    found = _program(
        "%x = bf16[64,8,128]{2,1,0:T(8,128)(2,1)} parameter(0)",
        "%r = bf16[64,8,128] all-reduce(%x), replica_groups={{0,1,2,3}}, to_apply=%add",
        '%k = token[] after-all(), frontend_attributes={MegascaleRendezvousKeyName="all-reduce.6_0"}',
        "%send.1 = (bf16[64,8,128]{2,1,0:T(8,128)(2,1)}, u32[]{:S(2)}, token[]) send(%r, %k), channel_id=4, is_host_transfer=true, "
        'frontend_attributes={_xla_megascale_reduce_operation="SUM",_xla_megascale_target="{1,2}x{0:3}",_xla_megascale_transfer_type="ALL_REDUCE"}',
        "%recv.1 = (bf16[64,8,128]{2,1,0}, u32[]{:S(2)}, token[]) recv(%k), channel_id=3, is_host_transfer=true, "
        'frontend_attributes={_xla_megascale_transfer_type="ALL_REDUCE"}',
        "ROOT %d = token[] send-done(%send.1), channel_id=4, is_host_transfer=true",
        partitions=4,
        across={"data": 2, "fsdp": 1},
    )
    size = 64 * 8 * 128 * 2
    assert found.collectives == (Collective("all-reduce", "fsdp", size, 1), Collective("all-reduce", "data", size, 1))


@pytest.mark.parametrize(
    ("left", "right", "out", "attributes", "flops"),
    [
        # A plain product [64, 32] x [32, 16], as TPU's compiler writes it.
        ("[64,32]", "[32,16]", "[64,16]", "dim_labels=bf_io->bf", 2 * 64 * 32 * 16),
        # Scores of 2 x 8 heads: the window meets one element at each place of the result, the others are holes between them.
        (
            "[2,8,512,128]",
            "[2,8,512,128]",
            "[2,8,512,512]",
            "window={size=2x8 stride=1x7 lhs_dilate=2x8}, dim_labels=01bf_01oi->01bf",
            2 * 2 * 8 * 512 * 512 * 128,
        ),
        # Queries of 32 heads from two gathered parts of the width, each 256: the window slides over one place with 31 of padding around it.
        (
            "[2,4096,2,256,1]",
            "[32,128,2,256,1]",
            "[2,4096,32,128,1]",
            "window={size=1x32x2 pad=0_0x31_31x0_0 rhs_reversal=0x1x0}, dim_labels=0b2f1_1o2i0->0b1f2",
            2 * 2 * 4096 * 512 * 32 * 128,
        ),
        # A true convolution: 6 places of a row of 8, 3 wide, 4 channels to 5.
        ("[7,8,4]", "[3,4,5]", "[7,6,5]", "window={size=3}, dim_labels=b0f_0io->b0f", 2 * 7 * 6 * 3 * 4 * 5),
        # The same with one place of padding on each side: the outermost places lack a product.
        ("[7,8,4]", "[3,4,5]", "[7,8,5]", "window={size=3 pad=1_1}, dim_labels=b0f_0io->b0f", 2 * 7 * (8 * 3 - 2) * 4 * 5),
        # Four groups of one channel each.
        ("[7,8,4]", "[3,1,4]", "[7,6,4]", "window={size=3}, dim_labels=b0f_0io->b0f, feature_group_count=4", 2 * 7 * 6 * 3 * 4),
    ],
    ids=["product", "batched", "heads", "convolution", "padded", "grouped"],
)
def test_convolutions_count_the_products_that_exist(left, right, out, attributes, flops):
    found = _program(
        f"%a = bf16{left} parameter(0)",
        f"%b = bf16{right} parameter(1)",
        f"ROOT %c = f32{out} convolution(%a, %b), {attributes}",
    )
    assert found.flops == flops


_LOOP = """%body (s: (s32[], f32[64,64])) -> (s32[], f32[64,64]) {{
  %s = (s32[]{{:T(128)}}, f32[64,64]{{1,0:T(8,128)}}) parameter(0)
  %i = s32[]{{:T(128)}} get-tuple-element(%s), index=0
  %step = s32[]{{:T(128)}} constant({step})
  %more = s32[]{{:T(128)}} add(%i, %step)
  %m = f32[64,64]{{1,0:T(8,128)}} get-tuple-element(%s), index=1
  %product = f32[64,64]{{1,0:T(8,128)}} dot(%m, %m), lhs_contracting_dims={{1}}, rhs_contracting_dims={{0}}
  %sum = f32[64,64]{{1,0}} all-reduce(%product), replica_groups=[2,4]<=[8], to_apply=%add
  ROOT %t = (s32[]{{:T(128)}}, f32[64,64]{{1,0:T(8,128)}}) tuple(%more, %sum)
}}

%compare_computation (p0: s32[], p1: s32[]) -> pred[] {{
  %p0 = s32[]{{:T(128)}} parameter(0)
  %p1 = s32[]{{:T(128)}} parameter(1)
  ROOT %c = pred[]{{:T(512)}} compare(%p0, %p1), direction=LT
}}

%condition (s: (s32[], f32[64,64])) -> pred[] {{
  %s = (s32[]{{:T(128)}}, f32[64,64]{{1,0:T(8,128)}}) parameter(0)
  %end = s32[]{{:T(128)}} constant(12), metadata={{op_name="jit(f)/while"}}
  %i = s32[]{{:T(128)}} get-tuple-element(%s), index=0
  ROOT {compare}
}}
"""
_PLAIN = "%c = pred[]{:T(512)} compare(%i, %end), direction=LT"


@pytest.mark.parametrize(
    ("compare", "start", "step", "config", "times"),
    [
        (_PLAIN, 0, 1, "", 12),
        (_PLAIN, 2, 5, "", 2),
        ("%c = pred[]{:T(512)} compare(%i, %end), direction=LE", 0, 1, "", 13),
        ("%c = pred[]{:T(512)} fusion(%i, %end), kind=kLoop, calls=%compare_computation", 0, 1, "", 12),
        (
            "%c = pred[]{:T(512)} compare(%i, %i), direction=LT",
            0,
            1,
            ', backend_config={"known_trip_count":{"n":"7"},"known_init_step":{"init":"0"}}',
            7,
        ),
        ("%c = pred[]{:T(512)} compare(%i, %i), direction=LT", 0, 1, "", 1),  # known only when it runs
    ],
    ids=["plain", "from 2 by 5", "up to and with", "fused", "told", "unknown"],
)
def test_what_a_loop_does_counts_as_often_as_it_runs(compare, start, step, config, times):
    found = _program(
        "%m = f32[64,64]{1,0:T(8,128)} parameter(0)",
        f"%zero = s32[]{{:T(128)}} constant({start})",
        "%first = s32[]{:T(128)} copy(%zero)",
        "%t = (s32[]{:T(128)}, f32[64,64]{1,0:T(8,128)}) tuple(%first, /*index=1*/%m)",
        f"ROOT %w = (s32[]{{:T(128)}}, f32[64,64]{{1,0:T(8,128)}}) while(%t), condition=%condition, body=%body{config}",
        before=_LOOP.format(step=step, compare=compare),
    )
    assert found.flops == times * 2 * 64**3
    assert found.collectives == (Collective("all-reduce", "fsdp", times * 64 * 64 * 4, times),)


@pytest.mark.parametrize(
    ("mask", "window", "pairs"),
    [("NO_MASK", 0, 4096 * 1024), ("CAUSAL", 0, 4096 * 1024 // 2), ("CAUSAL", 256, 4096 * 256)],
)
def test_cudnn_attention_counts_its_products(mask, window, pairs):
    """Two forward and five backward, of 2 rows, 8 heads of 64, 4096 queries, 1024 keys."""
    settings = (
        'backend_config={"cudnn_fmha_backend_config": {"intermediate_tensor_shape": {"element_type": "BF16", "dimensions": ["2", "8", "4096", '
        f'"1024"]}}, "mask_type": "{mask}", "sliding_window_length": {window}}}}}'
    )
    found = _program(
        "%q = bf16[2,4096,8,64] parameter(0)",
        f'%o = (bf16[2,8,4096,64]{{3,1,2,0}}, f32[2,8,4096], u8[0]) custom-call(%q), custom_call_target="__cudnn$fmhaSoftmax", {settings}',
        "ROOT %d = (bf16[2,8,4096,64]{3,1,2,0}, bf16[2,2,1024,64], bf16[2,2,1024,64], u8[0]) custom-call(%q), "
        f'custom_call_target="__cudnn$fmhaSoftmaxBackward", {settings}',
    )
    assert found.flops == 7 * 2 * 2 * 8 * pairs * 64


def test_kernels_are_counted_by_name_and_the_compilers_own_calls_are_not():
    """A Pallas kernel, whose notes hold a line break, counts the FLOPs that it states; a call of cuBLAS those of its shapes."""
    found = _program(
        "%a = bf16[64,32] parameter(0)",
        '%splash_mha_fwd.clone.3 = bf16[64,32] custom-call(%a), custom_call_target="tpu_custom_call", frontend_attributes={kernel_metadata={\n'
        '"block_q": 128\n}}, metadata={op_name="jit(f)/splash_mha_fwd/pallas_call"}, backend_config={"custom_call_config":{"body":"TUzv", '
        '"cost_estimate":{"flops":"4194304","transcendentals":"131072"}}}',
        '%b = bf16[64,32] custom-call(), custom_call_target="AllocateBuffer"',
        '%f = bf16[64,32] custom-call(%splash_mha_fwd.clone.3, %b), custom_call_target="__cudnn$convForward", backend_config={}',
        '%f2 = bf16[64,32] custom-call(%f, %b), custom_call_target="__cudnn$convForward", backend_config={}',
        "%w = bf16[32,16] parameter(1)",
        'ROOT %g = (bf16[64,16], s8[1024]) custom-call(%f2, %w), custom_call_target="__cublas$gemm", '
        'backend_config={"gemm_backend_config":{"dot_dimension_numbers":{"lhs_contracting_dimensions":["1"],"rhs_contracting_dimensions":["0"]}}}',
    )
    assert found.kernels == (("__cublas$gemm", 1), ("__cudnn$convForward", 2), ("splash_mha_fwd", 1))
    assert found.flops == 4194304 + 2 * 64 * 32 * 16


def test_a_compiled_program_has_the_flops_and_collectives_of_its_layout():
    """Six products under a scan and their gradient on 2 x 4 devices; weights are split over fsdp and gathered in the forward pass, the gradient
    is summed over all devices, since each sees its own rows."""
    L, M, K = 6, 64, 128
    mesh = Mesh(np.array(jax.devices()).reshape(2, 4), ("data", "fsdp"))
    split, whole = NamedSharding(mesh, PartitionSpec(None, "fsdp", None)), NamedSharding(mesh, PartitionSpec(None, None))

    def loss(weights: jax.Array, rows: jax.Array) -> jax.Array:
        def layer(rows: jax.Array, weight: jax.Array) -> tuple[jax.Array, None]:
            return jnp.tanh(rows @ jax.lax.with_sharding_constraint(weight, whole)), None

        return jnp.sum(jax.lax.scan(layer, rows, weights)[0])

    rows = NamedSharding(mesh, PartitionSpec(("data", "fsdp"), None))
    step = jax.jit(jax.grad(loss), out_shardings=split)
    weights = jax.ShapeDtypeStruct((L, K, K), jnp.float32, sharding=split)
    compiled = step.lower(weights, jax.ShapeDtypeStruct((M, K), jnp.float32, sharding=rows)).compile()
    found = count_program(compiled.as_text() or "", mesh.shape)
    assert found.flops == 3 * L * 2 * (M // 8) * K * K  # forward, and for each factor's gradient as much
    moved = {(collective.kind, collective.axis): (collective.bytes, collective.count) for collective in found.collectives}
    assert moved == {("all-gather", "fsdp"): (4 * L * K * K, L), ("all-reduce", "data+fsdp"): (4 * L * K * K, L)}


def test_a_loop_until_a_number_is_large_enough_counts_once():
    """Its end is a fraction and its turns are known only when it runs."""

    def until(x):
        return jax.lax.while_loop(
            lambda carry: carry[0] < 0.5, lambda carry: (jnp.abs(carry[1][0, 0]), carry[1] @ carry[1]), (jnp.zeros(()), x)
        )

    text = jax.jit(until).lower(jnp.ones((8, 8))).compile().as_text()
    assert text is not None and count_program(text, {"data": 1}).flops == 2 * 8**3


@pytest.mark.parametrize("text", ["", "\n", "HloModule test", "HloModule test\n\n%a (x: f32[8]) -> f32[8] {\n  %x = f32[8] parameter(0)\n"])
def test_what_is_no_whole_program_is_not_counted_as_one(text):
    with pytest.raises(AssertionError, match="not the text of a program"):
        count_program(text, _AXES)
