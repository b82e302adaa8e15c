// base/invariant.h for the network: a broken invariant throws dmlc::Error, as all errors here do.
#ifndef BYTEPS_NET_LINK_INVARIANT_H_
#define BYTEPS_NET_LINK_INVARIANT_H_

#include "byteps/base/invariant.h"
#include "dmlc/logging.h"

#define PS_INVARIANT(name, holds, seen) PS_INVARIANT_AS(::dmlc::Error, name, holds, seen)

#endif  // BYTEPS_NET_LINK_INVARIANT_H_
