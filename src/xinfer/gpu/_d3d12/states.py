"""Which state each buffer is in while a command list runs, and the barriers that follow from it."""

from __future__ import annotations

from xinfer.errors import DeviceError
from xinfer.gpu._bindings import d3d12 as d3d
from xinfer.gpu._d3d12.core import Handle
from xinfer.gpu._d3d12.memory import D3D12Buffer

UAV = d3d.D3D12_RESOURCE_STATE_UNORDERED_ACCESS
VIEW = d3d.D3D12_RESOURCE_STATE_NON_PIXEL_SHADER_RESOURCE
WRITTEN = (UAV, d3d.D3D12_RESOURCE_STATE_COPY_DEST)
EVERY_SUBRESOURCE = d3d.D3D12_RESOURCE_BARRIER_ALL_SUBRESOURCES


class States:
    """Buffers start each run in the common state, out of which the first use of any kind takes them by itself.

    After that a change needs a transition. When the run has ended they are back in the common state.
    """

    def __init__(self, commands: Handle) -> None:
        self._commands = commands
        self._of: dict[D3D12Buffer, int] = {}

    def need(self, *wanted: tuple[D3D12Buffer, int]) -> None:
        """Have buffers in these states for the next command. Raises DeviceError where one would have to be in two."""
        changes = []
        if len({buffer for buffer, _ in wanted}) != len(set(wanted)):
            labels = sorted({buffer.label for buffer, _ in wanted})
            raise DeviceError(f"one command reads and writes the same buffer of {labels}: use two buffers")
        for buffer, state in wanted:
            before = self._of.get(buffer, state)
            if before != state:
                changes.append(self._transition(buffer, before, state))
            self._of[buffer] = state
        self._record(changes)

    def barrier(self) -> None:
        """Everything written before, by shaders or copies, is seen by what follows."""
        written = [buffer for buffer, state in self._of.items() if state in WRITTEN]
        changes = [self._transition(buffer, self._of[buffer], UAV) for buffer in written if self._of[buffer] != UAV]
        everything = d3d.D3D12_RESOURCE_UAV_BARRIER(None)
        changes.append(d3d.D3D12_RESOURCE_BARRIER(Type=d3d.D3D12_RESOURCE_BARRIER_TYPE_UAV, UAV=everything))
        self._of |= dict.fromkeys(written, UAV)
        self._record(changes)

    @staticmethod
    def _transition(buffer: D3D12Buffer, before: int, after: int) -> d3d.D3D12_RESOURCE_BARRIER:
        change = d3d.D3D12_RESOURCE_TRANSITION_BARRIER(buffer.handle.address, EVERY_SUBRESOURCE, before, after)
        return d3d.D3D12_RESOURCE_BARRIER(Type=d3d.D3D12_RESOURCE_BARRIER_TYPE_TRANSITION, Transition=change)

    def _record(self, barriers: list[d3d.D3D12_RESOURCE_BARRIER]) -> None:
        if barriers:
            array = (d3d.D3D12_RESOURCE_BARRIER * len(barriers))(*barriers)
            self._commands.call("ResourceBarrier", len(barriers), array)
