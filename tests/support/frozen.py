"""Imported last by the server that ranks are forked from: what it has is never looked at again by their collector.

A collection that walks through all that torch imported takes 0.2 s, and copies every page that holds an object.
"""

import gc

gc.collect()
gc.freeze()
