"""Sparse: what the lossless codecs of sparse gradients compute, one function after the other and without collectives.

`bitmap` tells what is not zero. The rest is the sketch's: `heads` is what ranks tell each other first, `fixed_point`
makes numbers integers, whose sums are exact in any order, but for those of an `exception_list`, `peeling` hashes them
into a table of cells and takes them out again, `background_call` lets that be prepared while the table travels, `cells`
packs the cells into bits.

What must stay: the same bits on every rank, and no loss.
"""
