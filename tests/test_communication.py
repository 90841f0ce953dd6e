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
def test_the_page_has_what_the_program_prints():
    """Counts exactly, and memory, which depends on the number of threads, nearly."""
    text = PAGE.read_text()
    now = communication.rewritten_page(text)
    size = re.compile(r"([\d,]+) MiB(?= \|)")
    assert size.sub("MiB", now) == size.sub("MiB", text)
    sizes = [[float(each.replace(",", "")) for each in size.findall(page)] for page in (now, text)]
    assert len(sizes[0]) >= 18
    assert sizes[0] == pytest.approx(sizes[1], rel=0.05)
