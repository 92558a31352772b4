"""The numerics: tensors in, tensors out.  No kernel knows an operator.

Which kernel serves which operation of which recurrence, on a processor:

=====================  ===============  ===============  ==============  ======================
class                  maps, adjoints   strips           matrices        gradients
=====================  ===============  ===============  ==============  ======================
ElementwiseRecurrence  odd_even         pivot_tree,      chunk_tree      odd_even
                                        pivot_strip
SelectiveScan          token_loop       pivot_tree,      pivot_tree      scan_backward
                                        pivot_strip
ScalarDecayHeads       chunks,          chunk_tree,      chunk_tree      chunks,
                       within_chunk     pivot_tree                       within_chunk
VectorDecayHeads       chunks,          chunk_tree,      chunk_tree,     attention_backward
                       within_chunk,    chunks,          chunks,
                       odd_even         within_chunk,    within_chunk
                                        pivot_tree,
                                        pivot_strip
DeltaRule              chunks,          chunk_tree,      chunk_tree,     chunks,
                       ut_transform     chunks,          chunks,         within_chunk,
                                        ut_transform     ut_transform    ut_transform
=====================  ===============  ===============  ==============  ======================

Matrices are per head; gradients are with respect to coefficients and values.  Rows of single
positions are adjoints of unit vectors.  VectorDecayHeads takes odd_even for few vectors.  Its
strips and the strips of ScalarDecayHeads are trees of pivots where factors are common to the
channels of a head, and trees of chunks elsewhere.  Where a DeltaRule has a decay for each key
channel, its gradients take attention_backward in place of within_chunk.  On a GPU a launch for each
token would cost more than its arithmetic.  There fused_scan replaces token_loop and scan_backward,
and fused_fading serves an ElementwiseRecurrence.  Without Triton, odd_even serves there, and chunks
for many vectors.  Other operators need none of these: diagonals and short convolutions are bands,
long convolutions fast Fourier transforms, and given matrices products.  The mixers' projections by
weights in bfloat16 are wide_products there.

Names of their algorithms; each module has a reference, and its naive version in tests/oracles:

=====================  ====================================================================
odd_even               odd-even (cyclic) reduction of first-order linear recurrences
token_loop             the recurrence token by token, Mamba's recurrent mode
fused_scan             the same in one launch: prefix computations of runs of tokens, on a GPU
fused_fading           first-order linear recurrences in one launch, on a GPU
wide_products          float32 as a sum of two numbers of bfloat16, on a GPU
chunks                 the SSD algorithm of Mamba-2: matrices within chunks, states between
within_chunk           prefix products by recursive doubling, and sums that hold them
ut_transform           the UT/WY transform of products of Householder-like updates
chunk_tree             assembly of hierarchically semiseparable matrices from chunks
pivot_tree             assembly of semiseparable matrices from blocks of low rank
pivot_strip            rows of semiseparable matrices by the state at a pivot
scan_backward          Mamba's scan whose backward computes the states again, by chunks
attention_backward     gradients of linear attention whose decays differ by channel
=====================  ====================================================================

They share :mod:`.arithmetic`, :mod:`.truths` (checks that are read from a device together),
:mod:`.bands` (band matrices), :mod:`.rows` (strips and positions) and :mod:`.portions` (sizes of
the parts of work).
"""
