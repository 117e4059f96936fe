"""The columns that transforms write for one another, all under one name of the batch.

====================================== ================= ===============================================
column                                  shape, dtype      meaning
====================================== ================= ===============================================
``("headrace", "reward")``              (N,) float        the rollout's one reward, on each of its rows;
                                                          (N, K) where it has several
``("headrace", "speaks")``              (N,) bool         the first row of each rollout
``("headrace", "return")``              (N,) float        the return from this segment on
``("headrace", "counted")``             (N,) bool         False: out of the statistics; absent: all count
``("headrace", "in_loss")``             (N,) bool         False: out of the loss; absent: all are in
``("headrace", "minibatch")``           (N,) int64        which optimiser step of the batch, from 0; −1: none
``("headrace", "microbatch")``          (N,) int64        which forward and backward of the step, from 0
``("headrace", "rank")``                (N,) int64        which data-parallel rank trains it; absent: one
``("headrace", "padding")``             (N,) bool         a copy that trains nothing; absent: no row is
``("headrace", "row")``                 (N,) int64        row number at the pipeline's door
``("headrace", "processed")``           (N,) bool         a pipeline has been over this row
====================================== ================= ===============================================
"""

from __future__ import annotations

REWARD = ("headrace", "reward")
RETURN = ("headrace", "return")
SPEAKS = ("headrace", "speaks")
COUNTED = ("headrace", "counted")
IN_LOSS = ("headrace", "in_loss")
MINIBATCH = ("headrace", "minibatch")
MICROBATCH = ("headrace", "microbatch")
RANK = ("headrace", "rank")
PADDING = ("headrace", "padding")
ROW = ("headrace", "row")
PROCESSED = ("headrace", "processed")
