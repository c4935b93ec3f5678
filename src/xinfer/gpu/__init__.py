"""GPUs: buffers, kernels and recordings, behind one interface for every graphics API."""

from __future__ import annotations
