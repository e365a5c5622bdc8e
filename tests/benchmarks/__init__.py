"""Measurements of nbdist against its peers, in one run on one machine: ``python -m tests.benchmarks NAME``.

The two sides of a ratio are measured alternately and compared by their medians, so that what else the machine does
falls on both. Times depend on the machine; the ratios are what to look at.
"""
