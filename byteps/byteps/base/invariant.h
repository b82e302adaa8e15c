// ps/invariant.h for this namespace: a broken invariant throws Error.
#ifndef BYTEPS_BASE_INVARIANT_H_
#define BYTEPS_BASE_INVARIANT_H_

#include "byteps/base/error.h"
#include "ps/invariant.h"

#define BPS_INVARIANT(name, holds, seen) PS_INVARIANT_AS(::byteps::core::Error, name, holds, seen)

#endif  // BYTEPS_BASE_INVARIANT_H_
