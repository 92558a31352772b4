"""Recurrences over tokens: one structure, six definitions.

A token writes to a state, the state is carried on, and a token reads it:

    S[t] = carry[t] S[t-1] + writes[t] v[t],      y[t] = reads[t] . S[t]

=====================  ====================================  ==============  ========  ==========
module                 carry                                 writes          reads     state
=====================  ====================================  ==============  ========  ==========
:mod:`.elementwise`    decay, one number per channel         1               1         1
:mod:`.selective_scan` exp(dt A), per channel and state      dt B            C         N
:mod:`.scalar_decay`   decay, one number per head            scale k         q         N, P
:mod:`.vector_decay`   diag(decay), per head and key channel k               q         N, P
:mod:`.delta_rule`     (I - beta k k^T) diag(decay), or      beta k          q         N, P
                       diag(decay) - (a e) e^T
:mod:`.feedback`       diag(decay) + write R gate of t - 1   write           gate      P
=====================  ====================================  ==============  ========  ==========

:mod:`.base` derives maps and matrices from these.  The first two classes give reads, writes and
products of carries between any two tokens; the next three give them for whole chunks; the last goes
from token to token.
"""
