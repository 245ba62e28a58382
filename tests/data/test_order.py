import numpy as np

from telamon.data.order import Order, mix


def test_mix_is_the_published_splitmix64_sequence():
    # The first outputs of SplitMix64 with seed 1234567, as printed in many implementations' tests.
    state = np.uint64(1234567) + np.arange(3, dtype=np.uint64) * np.uint64(0x9E3779B97F4A7C15)
    assert mix(state).tolist() == [6457827717110365317, 3203168211198807973, 9817491932198370423]


def test_each_epoch_is_another_permutation_of_the_whole_set():
    epochs = [Order(7).of(20, epoch=e) for e in range(10)]
    assert all(sorted(order) == list(range(20)) for order in epochs)
    assert len({tuple(order) for order in epochs}) == 10


def test_shuffle_off_keeps_the_order():
    assert Order(7, shuffle=False).of(20, epoch=3).tolist() == list(range(20))


def test_shuffling_reaches_the_whole_set():
    order = Order(0).of(10_000, epoch=0)
    distance = np.abs(order - np.arange(10_000)).mean()
    assert abs(distance - 10_000 / 3) < 150  # two uniform places lie a third of the range apart on average


def test_seed_epoch_and_source_each_change_the_order():
    orders = {tuple(Order(s, i).of(50, epoch=e)) for s in (0, 1) for e in (0, 1) for i in (0, 1)}
    assert len(orders) == 8
