"""The numerics: tensors in, tensors out.  No kernel knows an operator.

Which kernel serves which operation of which recurrence, on a processor:

=====================  ======================  ======================  ======================
class                  maps, adjoints          strips                  matrices of heads
=====================  ======================  ======================  ======================
ElementwiseRecurrence  odd_even                pivot_tree,             chunk_tree
                                               pivot_strip
SelectiveScan          token_loop              pivot_tree,             pivot_tree
                                               pivot_strip
ScalarDecayHeads       chunks,                 chunk_tree,             chunk_tree
                       within_chunk            pivot_tree
VectorDecayHeads       chunks,                 chunk_tree, chunks,     chunk_tree, chunks,
                       within_chunk,           within_chunk,           within_chunk
                       odd_even                pivot_tree,
                                               pivot_strip
DeltaRule              chunks,                 chunk_tree, chunks,     chunk_tree, chunks,
                       ut_transform            ut_transform            ut_transform
=====================  ======================  ======================  ======================

Rows of single positions are adjoints of unit vectors.  VectorDecayHeads takes odd_even for few
vectors; its strips, like those of ScalarDecayHeads, are trees of pivots where factors are common to
the channels of a head, and trees of chunks else.  On a GPU, where a launch for each token would
cost more than its arithmetic, chunks serve in place of token_loop.  Other operators need none of
these: diagonals and short convolutions are bands, long convolutions fast Fourier transforms, and
given matrices products.

What their algorithms are called; each module says more, with a reference and its naive version in
tests/oracles:

============  =====================================================================
odd_even      odd-even (cyclic) reduction of first-order linear recurrences
token_loop    the recurrence token by token, Mamba's recurrent mode
chunks        the SSD algorithm of Mamba-2: matrices within chunks, states between
within_chunk  prefix products by recursive doubling, and sums that hold them
ut_transform  the UT/WY transform of products of Householder-like updates
chunk_tree    assembly of hierarchically semiseparable matrices from chunks
pivot_tree    assembly of semiseparable matrices from blocks of low rank
pivot_strip   rows of semiseparable matrices by the state at a pivot
============  =====================================================================

They share :mod:`.arithmetic`, :mod:`.bands` (band matrices), :mod:`.rows` (strips and positions)
and :mod:`.portions` (how work is cut into parts).
"""
