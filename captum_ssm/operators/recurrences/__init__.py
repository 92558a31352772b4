"""Recurrences over tokens: one common structure, and six modules that define its factors.

Each token multiplies the state by a factor, adds its value times a vector, and reads the state:

    S[t] = carry[t] S[t-1] + writes[t] v[t],      y[t] = reads[t] . S[t]

=====================  ====================================  ==============  ========  ==========
module                 carry                                 writes          reads     state
=====================  ====================================  ==============  ========  ==========
:mod:`.elementwise`    decay, one scalar per channel         1               1         1
:mod:`.selective_scan` exp(dt A), per channel and state      dt B            C         N
:mod:`.scalar_decay`   decay, one scalar per head            scale k         q         N, P
:mod:`.vector_decay`   diag(decay), per head and key channel k               q         N, P
:mod:`.delta_rule`     (I - beta k k^T) diag(decay), or      beta k          q         N, P
                       diag(decay) - (a e) e^T
:mod:`.feedback`       diag(decay) + write R gate of t - 1   write           gate      P
=====================  ====================================  ==============  ========  ==========

:mod:`.base` computes maps and matrices from these factors.  The first two classes define reads,
writes and products of carries between any two tokens.  The next three define them for whole chunks.
The last class is a loop over tokens.
"""
