// The entry of the simulator: what a kernel includes. The names, template arguments and
// argument order are those of the public Ascend C API; the code is this project's own.
#pragma once

#include "sim_cast.h"
#include "sim_copy.h"
#include "sim_pipe.h"
#include "sim_reduce.h"
#include "sim_select.h"
#include "sim_tensor.h"
#include "sim_types.h"
#include "sim_vector.h"
