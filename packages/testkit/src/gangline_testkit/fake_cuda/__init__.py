"""A fake CUDA device for tests: gangline's code for GPUs runs on a machine without a GPU, and computes real numbers.

`load` builds and loads a device for a CPU build of torch (`device.cpp`): its tensors are on `cuda:0`, their memory is
host memory, and CPU kernels compute. Autograd runs backward passes in the thread of the device, as on a GPU. So a test
can run a strategy, or `train` as a whole, as on a GPU, and compare its numbers with those of the CPU. `Watch` counts
kernels and the places where the host waits for the device.

It cannot show: speed, the order of streams, and the rounding of a GPU's own kernels.

`load` must run before torch is imported: `pytest -p gangline_testkit.fake_cuda.plugin`.
"""
