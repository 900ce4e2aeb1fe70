"""What a strategy imports: the runtime that it builds, and what core's own strategies are made of.

A strategy cuts a model by its plan over the mesh and runs one step. Read `Runtime` first, and `SingleRuntime`, the
smallest one. Torch is loaded with the first name that needs it.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from gangline.plugin.lazy import lazily

if TYPE_CHECKING:
    from gangline.batch import Batch as Batch
    from gangline.mesh import AXES as AXES, DATA_AXES as DATA_AXES, Mesh as Mesh
    from gangline.model.buffers import (
        buffers_of as buffers_of,
        filled_buffers_of as filled_buffers_of,
        listeners as listeners,
        put as put,
    )
    from gangline.model.build import model_of as model_of
    from gangline.model.calls import call_of as call_of
    from gangline.model.contracts import (
        OwnProducts as OwnProducts,
        StepListener as StepListener,
        bind_around as bind_around,
        bind_linear as bind_linear,
        seam_function as seam_function,
    )
    from gangline.model.seams import call_at as call_at, calls as calls, recomputed as recomputed
    from gangline.parallel.config import Ddp as Ddp, Single as Single
    from gangline.parallel.matrices import Matrices as Matrices
    from gangline.parallel.metrics import Tally as Tally
    from gangline.parallel.microbatch import (
        count_on_host as count_on_host,
        count_tokens as count_tokens,
        frame_of as frame_of,
    )
    from gangline.parallel.norm import (
        MeasuredNorm as MeasuredNorm,
        ordered_norm as ordered_norm,
        row_squares as row_squares,
    )
    from gangline.parallel.owners import (
        MatrixId as MatrixId,
        matrix_traffic as matrix_traffic,
        most_matrix_bytes as most_matrix_bytes,
    )
    from gangline.parallel.prepare import (
        Finish as Finish,
        bind_folds as bind_folds,
        finish_head as finish_head,
        full_product as full_product,
        refuse_own as refuse_own,
        set_products as set_products,
    )
    from gangline.parallel.sample_losses import (
        check_share as check_share,
        evaluated as evaluated,
        in_global_order as in_global_order,
    )
    from gangline.parallel.single import SingleRuntime as SingleRuntime
    from gangline.parallel.storage import dtype_name as dtype_name
    from gangline.plan import (
        Cut as Cut,
        Fold as Fold,
        Plan as Plan,
        block_number as block_number,
        is_mapped as is_mapped,
        matches as matches,
        names as names,
    )
    from gangline.runtime import (
        ParamShard as ParamShard,
        Runtime as Runtime,
        ShardedParam as ShardedParam,
        StepResult as StepResult,
    )
    from gangline.sampling.decode import Stop as Stop, decode as decode
    from gangline.sampling.on_ranks import writing as writing
    from gangline.sampling.options import Sampling as Sampling, Written as Written
    from gangline.shard import (
        Division as Division,
        Layout as Layout,
        Registry as Registry,
        Shard as Shard,
        itemsize as itemsize,
        model_array as model_array,
        parameter_of as parameter_of,
    )
    from gangline.train.recompute_and_compile import finisher as finisher
    from gangline.weight_grads import (
        Closure as Closure,
        accumulate_grad as accumulate_grad,
        defer as defer,
        deferring as deferring,
        is_deferring as is_deferring,
        when_accumulated as when_accumulated,
    )

__getattr__, __all__ = lazily(
    __name__,
    {
        "gangline.runtime": "ParamShard Runtime ShardedParam StepResult",
        "gangline.batch": "Batch",
        "gangline.mesh": "AXES DATA_AXES Mesh",
        "gangline.plan": "Cut Fold Plan block_number is_mapped matches names",
        "gangline.sampling.decode": "Stop decode",
        "gangline.sampling.on_ranks": "writing",
        "gangline.sampling.options": "Sampling Written",
        "gangline.shard": "Division Layout Registry Shard itemsize model_array parameter_of",
        "gangline.parallel.config": "Ddp Single",
        "gangline.parallel.matrices": "Matrices",
        "gangline.parallel.metrics": "Tally",
        "gangline.parallel.microbatch": "count_on_host count_tokens frame_of",
        "gangline.parallel.norm": "MeasuredNorm ordered_norm row_squares",
        "gangline.parallel.owners": "MatrixId matrix_traffic most_matrix_bytes",
        "gangline.parallel.prepare": "Finish bind_folds finish_head full_product refuse_own set_products",
        "gangline.parallel.sample_losses": "check_share evaluated in_global_order",
        "gangline.parallel.single": "SingleRuntime",
        "gangline.parallel.storage": "dtype_name",
        "gangline.model.buffers": "buffers_of filled_buffers_of listeners put",
        "gangline.model.build": "model_of",
        "gangline.model.calls": "call_of",
        "gangline.model.contracts": "OwnProducts StepListener bind_around bind_linear seam_function",
        "gangline.model.seams": "call_at calls recomputed",
        "gangline.train.recompute_and_compile": "finisher",
        "gangline.weight_grads": "Closure accumulate_grad defer deferring is_deferring when_accumulated",
    },
)
