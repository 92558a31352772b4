"""Numerical algorithms on tensors.  Kernels import no operators.

The kernel that each recurrence uses for each operation, on a CPU:

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
                       ut_transform     chunks,          chunks,         ut_transform,
                                        ut_transform     ut_transform    attention_backward
=====================  ===============  ===============  ==============  ======================

Matrices are per head; gradients are with respect to coefficients and values.  A row at one position
is the adjoint of a unit vector.  VectorDecayHeads uses odd_even for few vectors.  Strips of
ScalarDecayHeads and VectorDecayHeads use pivot_tree if the factors are equal for all channels of a
head, and chunk_tree otherwise.

On a GPU a launch per token would cost more than the token's arithmetic.  There fused_scan replaces
token_loop and scan_backward, and ElementwiseRecurrence uses fused_fading; both need Triton.  The
mixers' projections by weights in half precision use wide_products.  Other operators need none of
these kernels: diagonals and short convolutions are bands, long convolutions use fast Fourier
transforms, and explicit matrices use matrix products.

Names of the algorithms; each module cites a reference and names a naive version in tests/oracles:

=====================  ====================================================================
odd_even               odd-even (cyclic) reduction of first-order linear recurrences
token_loop             the recurrence token by token, Mamba's recurrent mode
fused_scan             token_loop in one GPU launch: prefix computations over runs of tokens
fused_fading           first-order linear recurrences in one launch, on a GPU
wide_products          float32 vectors times weights in half precision
chunks                 the SSD algorithm of Mamba-2: matrices within chunks, states between
within_chunk           prefix products by recursive doubling, and sums of such products
ut_transform           the UT/WY transform of products of Householder-like updates
chunk_tree             assembly of hierarchically semiseparable matrices from chunks
pivot_tree             assembly of semiseparable matrices from blocks of low rank
pivot_strip            rows of semiseparable matrices from the state at one token, the pivot
scan_backward          Mamba's scan with a backward that recomputes states chunk by chunk
attention_backward     gradients of linear attention with a decay for each channel
=====================  ====================================================================

All share :mod:`.arithmetic`, :mod:`.truths` (checks whose results are read from a GPU together),
:mod:`.bands` (band matrices), :mod:`.rows` (strips and positions) and :mod:`.portions` (how many
tokens or heads to compute together).
"""
