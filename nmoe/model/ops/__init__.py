"""The model's operations, once per kind of device, as tables with the same methods.

| table | where |
|---|---|
| `torch.TorchOps` | anywhere: the definition of every operation, in torch |
| `cpu.ops.CpuOps` | on a CPU: products by oneDNN, weights packed where the engine asks for it |
| `cpu.ops.KernelOps` | in the engine's thread with fast numerics: C++ kernels, without gradients |
| `exact.ops.ExactOps` | exact numerics in fp32 on a CPU: C++ kernels, with gradients |
| `exact.ops.OrderFreeOps` | exact numerics elsewhere: sums that no order changes |
| `triton.ops.TritonOps`, `OrderFreeTritonOps` | on CUDA |

`table.ops_for(x, exact)` chooses the table, once for each call of a module. Nothing else asks which kernels there are.

Exact numerics give a row the same bits in every batch, so that engine and learner agree. Libraries cannot promise that: they take
another kernel for another number of rows, and add in another order. So products and attention are our own kernels, which add in
order, or sums in fp64 that are exact in any order. What stays torch's works element by element or row by row: norms, softmax,
exponential, logarithm. `nmoe.model.exactness` tries all of it when a run starts.
"""
