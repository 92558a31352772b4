"""Numerical algorithms on tensors.  Kernels import no operators.

The kernel that each recurrence uses for each operation, on a CPU:

=====================  =========================  ==============  ==============================
class                  maps, adjoints             matrices        gradients
=====================  =========================  ==============  ==============================
ElementwiseRecurrence  odd_even                   triangle        odd_even
SelectiveScan          token_loop                 triangle        scan_backward
ScalarDecayHeads       chunks, within_chunk       triangle        chunks, within_chunk
VectorDecayHeads       chunks, within_chunk,      triangle        attention_backward
                       odd_even
DeltaRule              chunks, ut_transform       triangle        chunks, ut_transform,
                                                                  attention_backward
=====================  =========================  ==============  ==============================

Gradients are with respect to coefficients and values.  A row at one position is the adjoint of a
unit vector.  VectorDecayHeads uses odd_even for few vectors.  triangle computes whole matrices and
strips of rows, from the chunks of chunks, within_chunk and ut_transform.

On a GPU a launch per token would cost more than the token's arithmetic.  There fused_scan replaces
token_loop and scan_backward, if Triton is installed.  The mixers' projections by weights in half
precision use wide_products.  Other operators need none of these kernels: diagonals and short
convolutions are bands, long convolutions use fast Fourier transforms, and explicit matrices use
matrix products.

Names of the algorithms; each module cites a reference and names a naive version in tests/oracles:

=====================  ====================================================================
odd_even               odd-even (cyclic) reduction of first-order linear recurrences
token_loop             the recurrence token by token, Mamba's recurrent mode
fused_scan             token_loop in one GPU launch: prefix computations over runs of tokens
wide_products          float32 vectors times weights in half precision
chunks                 the SSD algorithm of Mamba-2: matrices within chunks, states between
within_chunk           prefix products by recursive doubling, and sums of such products
ut_transform           the UT/WY transform of products of Householder-like updates
triangle               assembly of (hierarchically) semiseparable matrices and their rows
scan_backward          Mamba's scan with a backward that recomputes states chunk by chunk
attention_backward     gradients of linear attention with a decay for each channel
=====================  ====================================================================

All share :mod:`.arithmetic`, :mod:`.truths` (checks whose results are read from a GPU together),
:mod:`.bands` (band matrices), :mod:`.rows` (strips and positions) and :mod:`.portions` (how many
tokens or heads to compute together).
"""
