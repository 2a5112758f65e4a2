// Compiled once per instruction set, with SORTRL_ISA naming it. Each set becomes a Python module of its own rather than
// an object in a common one: the linker merges equal inline functions of all objects, and would hand code compiled for
// AVX-512 to a processor without it.
#include "limit.h"
#include "lp.h"
#include "max.h"
#include "network.h"
#include "sort.h"

namespace sortrl::SORTRL_ISA {

extern const Kernels kernels;
const Kernels kernels = {kLanes,       max_forward,   max_backward, max_bounds,   max_reach, lp_forward, lp_backward,
                         sort_forward, sort_backward, sort_bounds,  read_network, limit};

}  // namespace sortrl::SORTRL_ISA
