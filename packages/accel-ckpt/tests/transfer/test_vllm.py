"""vLLM's protocol against a stand-in for its workers that follows the documentation."""

import pytest
import torch

from accel_ckpt import OfferedWeights, Part, SingleProcess, VLLMServer, VLLMWeightTransfer
from accel_ckpt.errors import StateMismatchError, TransferError
from testkit import transfers, vllm_worker, worlds


def model():
    torch.manual_seed(0)
    return {
        "embed": torch.randn(40, 6).bfloat16(),
        "odd": torch.randn(3).bfloat16(),
        "norm": torch.randn(6),
        "up": torch.randn(30, 6).bfloat16(),
        "scale": torch.tensor(2.5),
    }


def transfer_to(engine, offers, *, workers=2, transport=None, **options):
    port = worlds.free_port()
    return VLLMWeightTransfer(
        offers,
        client=engine,
        connect=lambda: vllm_worker.Group("127.0.0.1", port, 0, 1 + workers),
        master_address="127.0.0.1",
        master_port=port,
        world_size=1 + workers,
        transport=transport,
        **options,
    )


def engine_of(workers=2):
    return vllm_worker.Engine([vllm_worker.Worker(number) for number in range(workers)])


@pytest.mark.parametrize("packed", [True, False])
def test_workers_load_whole_weights(packed):
    state, engine = model(), engine_of()
    offers = OfferedWeights(lambda: state, coordinator=SingleProcess())
    transfer = transfer_to(engine, offers, packed=packed, packed_buffer_bytes=100)
    for step in range(3):
        for tensor in state.values():
            tensor += step
        transfer.send()
        for worker in engine.workers:
            assert worker.weights.keys() == state.keys()
            assert all(torch.equal(worker.weights[name], state[name]) for name in state)
    total = sum(tensor.nbytes for tensor in state.values())
    for worker in engine.workers:
        assert worker.updates == 3
        assert sum(worker.broadcasts) == 3 * total
        assert len(worker.broadcasts) == (6 if packed else 15)


def test_over_http_with_ignored_and_tied_names():
    state, engine = model(), engine_of(1)
    state["lm_head"] = state["embed"]
    url, stop = vllm_worker.serve(engine)
    try:
        offers = OfferedWeights(lambda: state, coordinator=SingleProcess())
        transfer = transfer_to(VLLMServer(url, timeout=20), offers, workers=1, ignored=["sc*"])
        transfer.send()
    finally:
        stop()
    assert engine.workers[0].weights.keys() == {"embed", "odd", "norm", "up"}
    assert transfer.update_info["names"][0] == "norm", "wide elements come first, so that all are aligned"


def test_ranks_of_the_training_send_their_parts_to_the_first():
    whole, engine = model(), engine_of(1)

    def work(transport):
        half = slice(0, 13) if transport.rank == 0 else slice(13, 40)
        state = {**whole, "embed": Part(whole["embed"][half], (half.start, 0), (40, 6))}
        replicated = [name for name in whole if name != "embed"]
        offers = OfferedWeights(lambda: state, replicated=replicated, coordinator=transport)
        transfer = transfer_to(
            engine, offers, workers=1, transport=transport, packed_buffer_bytes=200, bucket_bytes=1024
        )
        transfer.send()
        transfer.send()
        return sum(nbytes for _, nbytes in transport.sent), transfer._buffer.nbytes

    answers = transfers.run(2, work)
    assert all(torch.equal(engine.workers[0].weights[name], whole[name]) for name in whole)
    assert answers[0][0] == 0
    assert answers[1][0] >= 2 * whole["embed"][13:].nbytes
    assert answers[0][1] <= 200 + whole["embed"].nbytes
    assert answers[1][1] == 0, "only the first rank holds whole weights"


def test_workers_that_fail_are_named_on_all_ranks():
    whole, engine = model(), engine_of(1)

    def work(transport):
        state = {"embed": Part(whole["embed"][20 * transport.rank :][:20], (20 * transport.rank, 0), (40, 6))}
        offers = OfferedWeights(lambda: state, coordinator=transport)
        transfer = transfer_to(engine, offers, workers=1, transport=transport)
        engine.workers[0].phase = "broken"
        transport.exchange(None)
        transfer.send()

    first, second = transfers.run(2, work)
    assert isinstance(first, AssertionError)
    assert isinstance(second, TransferError)
    assert "called in the phase broken" in str(second)


def test_workers_that_refuse_an_update_end_it_before_the_broadcast():
    state = model()

    class Refuses(vllm_worker.Engine):
        def update_weights(self, update_info):
            raise TransferError("422: unknown names")

    engine = Refuses([vllm_worker.Worker(0)])
    offers = OfferedWeights(lambda: state, coordinator=SingleProcess())
    transfer = transfer_to(engine, offers, workers=1)

    class Nobody:
        def broadcast(self, tensor, src):
            pass

    transfer._group = Nobody()
    with pytest.raises(TransferError, match="422: unknown names"):
        transfer.send()


def test_workers_that_cannot_join():
    class Refuses(vllm_worker.Engine):
        def init_weight_transfer_engine(self, init_info):
            raise TransferError("no such backend")

    offers = OfferedWeights(model, coordinator=SingleProcess())
    with pytest.raises(TransferError, match="no such backend"):
        VLLMWeightTransfer(
            offers, client=Refuses([]), connect=object, master_address="x", master_port=1, world_size=2
        )


def test_a_model_that_changed_starts_no_update():
    state, engine = model(), engine_of(1)
    offers = OfferedWeights(lambda: state, coordinator=SingleProcess())
    transfer = transfer_to(engine, offers, workers=1)
    state.pop("norm")
    with pytest.raises(StateMismatchError, match="no longer holds its parts of norm"):
        transfer.send()
    assert engine.workers[0].phase == "ready"


def test_a_server_that_answers_with_an_error():
    url, stop = vllm_worker.serve(engine_of(1))
    try:
        with pytest.raises(
            TransferError, match=r"start_weight_update answers 500: AssertionError: called in the"
        ):
            VLLMServer(url).start_weight_update()
    finally:
        stop()


def test_no_server():
    with pytest.raises(TransferError, match=r"does not answer: .*VLLM_SERVER_DEV_MODE=1"):
        VLLMServer(f"http://127.0.0.1:{worlds.free_port()}").finish_weight_update()


@pytest.mark.parametrize("url", ["file:///etc/passwd", "localhost:8000"])
def test_no_address_of_a_server(url):
    with pytest.raises(ValueError, match="is no address of a server"):
        VLLMServer(url)
