"""A rank's weights: master weights for the optimizer, copies in the compute dtype for the forward pass, buffers."""

from __future__ import annotations

import torch
from torch import Tensor, nn

from gangline.model.buffers import list_filled_buffers, put
from gangline.plan import Plan
from gangline.precision import Precision
from gangline.shard import name_dtype


def choose_kept_dtype(plan: Plan, name: str, precision: Precision) -> torch.dtype:
    """Return the dtype in which the parameter `name` is stored: `param_dtype`, unless the plan names another dtype."""
    dtype_name = plan.get_dtype(name)
    return precision.param_dtype if dtype_name is None else getattr(torch, dtype_name)


class WholeStorage:
    """Unsharded tensors of a model on this rank.

    masters   name -> master weight, a leaf tensor in `param_dtype` or the dtype of `plan.low_bit`: optimized and saved
    used      name -> the module's parameter: the master itself, or its copy if the compute dtype differs. Modules
              of `plan.master_dtype` compute with their masters, quantised modules with codes
    buffers   name -> persistent buffer: state that no optimizer updates

    Gradients appear in the used parameters in `grad_dtype`, for any compute dtype. A tied parameter is one tensor under
    its owner's name. Tensors without requires_grad are stored and saved, but not trained.
    """

    def __init__(self, model: nn.Module, plan: Plan, precision: Precision, device: torch.device) -> None:
        self.precision, self.device = precision, device
        self.masters: dict[str, Tensor] = {}
        self.used: dict[str, nn.Parameter] = {}
        self.buffers: dict[str, Tensor] = {}
        self._take_parameters(model, plan)
        self._take_buffers(model)
        self.trained = [name for name, parameter in self.used.items() if parameter.requires_grad]
        copied = [name for name in self.masters if self.masters[name] is not self.used[name]]
        self._masters_copied: list[Tensor] = [self.masters[name] for name in copied]
        self._copies: list[Tensor] = [self.used[name] for name in copied]

    def _take_parameters(self, model: nn.Module, plan: Plan) -> None:
        parameters = dict(model.named_parameters(remove_duplicate=False))
        names: dict[int, str] = {}  # id of a tensor -> its name, for tensors shared by several modules
        for alias, parameter in parameters.items():
            owner = plan.get_owner(alias)
            parameter = parameters.get(owner, parameter)
            name = names.setdefault(id(parameter), owner)
            if name not in self.used:
                self._materialise(name, parameter, plan)
            path, _, attribute = alias.rpartition(".")
            setattr(model.get_submodule(path), attribute, self.used[name])

    def _materialise(self, name: str, given: nn.Parameter, plan: Plan) -> None:
        dtypes, kept_dtype = self.precision, choose_kept_dtype(plan, name, self.precision)
        master = _copy_to(self.device, given.detach(), kept_dtype).requires_grad_(given.requires_grad)
        if plan.computes_as_stored(name) or dtypes.compute_dtype == kept_dtype:
            master = nn.Parameter(master.detach(), requires_grad=given.requires_grad)
            parameter = master
        else:
            copy = torch.empty_like(master, dtype=dtypes.compute_dtype, requires_grad=False)
            parameter = nn.Parameter(copy, requires_grad=given.requires_grad)
        for tensor in (master, parameter):
            if tensor.requires_grad and tensor.dtype != dtypes.grad_dtype:
                tensor.grad_dtype = dtypes.grad_dtype
        self.masters[name], self.used[name] = master, parameter

    def _take_buffers(self, model: nn.Module) -> None:
        for buffer in list_filled_buffers(model):
            local = _copy_to(self.device, buffer.tensor, buffer.tensor.dtype)
            put(model, buffer, local)
            if buffer.saved_name is not None:
                self.buffers[buffer.saved_name] = local

    def get_shapes(self) -> dict[str, tuple[tuple[int, ...], str]]:
        """Return name -> (shape, dtype name) of all arrays in a checkpoint."""
        return {name: (tuple(x.shape), name_dtype(x.dtype)) for name, x in self.get_arrays().items()}

    def get_arrays(self) -> dict[str, Tensor]:
        """Return masters and buffers by name, as tensors that may be written."""
        return {name: x.detach() for name, x in (*self.masters.items(), *self.buffers.items())}

    def refresh(self) -> None:
        """Copy the master weights to the compute copies.

        The copy is unconditional, because fused optimizers do not increase a tensor's version counter. It costs far
        less than the forward pass that follows.
        """
        if self._copies:
            with torch.no_grad():
                torch._foreach_copy_(self._copies, self._masters_copied)

    def clear_gradients(self) -> None:
        """Drop all gradients, so that the first microbatch sets gradients instead of adding to zeros."""
        for name in self.trained:
            self.used[name].grad = None
            self.masters[name].grad = None

    def assign_gradients(self) -> list[Tensor]:
        """Assign every trained master its gradient, or zeros, and return the gradients in order of `trained`."""
        gradients = []
        for name in self.trained:
            parameter = self.used[name]
            if parameter.grad is None:
                parameter.grad = torch.zeros_like(parameter, dtype=self.precision.grad_dtype)
            gradients.append(parameter.grad)
            self.masters[name].grad = parameter.grad
        return gradients


def _copy_to(device: torch.device, given: Tensor, dtype: torch.dtype) -> Tensor:
    """Return a tensor on `device`, with the values of `given` unless it is a meta tensor."""
    if given.is_meta:
        return torch.empty_like(given, device=device, dtype=dtype)
    return given.detach().to(device, dtype)
