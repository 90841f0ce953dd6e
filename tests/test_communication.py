"""What a process among many exchanges, and its memory: counted with a process group that sends nothing."""

import re
from pathlib import Path

import communication
import pytest
from communication import NODE, WRAPPINGS, count
from methods import architecture

from efficient_densenet import DenseNet

PAGE = Path(__file__).parents[1] / "docs" / "scaling.md"
MODEL = "densenet_bc_16_4"


@pytest.mark.parametrize("wrapping", WRAPPINGS)
def test_the_shared_engine_exchanges_no_more_than_plain(wrapping):
    with communication._processes(64):
        shared, plain = (count(MODEL, wrapping, engine, 8) for engine in ("shared", "plain"))
    assert 0 < shared.collectives <= plain.collectives
    assert 0 < shared.bytes <= plain.bytes


def test_a_ring_reduces_and_gathers_each_gradient():
    model = DenseNet(**architecture(MODEL))
    gradients = sum(parameter.nbytes for parameter in model.parameters())
    with communication._processes(64):
        assert count(MODEL, "DDP", "shared", 8).bytes == pytest.approx(2 * 63 / 64 * gradients)


def test_groups_of_a_node_receive_the_same_among_any_number_of_processes():
    received = []
    for size in (NODE, 64, 512):
        with communication._processes(size):
            synchronized = count(MODEL, f"DDP, norms synchronized over {NODE}", "shared", 8)
            received.append(synchronized.bytes - count(MODEL, "DDP", "shared", 8).bytes)
    assert received == pytest.approx([received[0]] * 3)


@pytest.mark.exhaustive
def test_the_page_has_the_counts_that_the_program_prints():
    counts = PAGE.read_text().partition("## The memory of a process")[0]
    assert communication.rewritten_page(counts) == counts


@pytest.mark.exhaustive
@pytest.mark.parametrize(("engine", "column"), [("plain", 0), ("shared", 0), ("shared", 2)])
def test_the_page_has_the_memory_that_is_measured(engine, column):
    """Nearly: each thread has buffers of its own."""
    memory = PAGE.read_text().partition("## The memory of a process")[2]
    cells = re.search(rf"^\| `fully_shard` over all \| `{engine}` \| (.*) \|$", memory, re.MULTILINE)[1].split(" | ")
    with communication._processes((8, 64, 512)[column]):
        peak = communication._peak("densenet121", "`fully_shard` over all", engine, 8, 224)
    assert peak / 2**20 == pytest.approx(float(cells[column].removesuffix(" MiB").replace(",", "")), rel=0.05)
