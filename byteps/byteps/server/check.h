// byteps-server --check: whether this process could join the job, and joins nothing.
#ifndef BYTEPS_SERVER_CHECK_H_
#define BYTEPS_SERVER_CHECK_H_

#include "byteps/server/options.h"

namespace byteps {
namespace core {

// Prints a line for each thing that was tried: "ok    ..." or "WRONG ...".  Returns the exit
// status.
int Check(const Arguments& arguments, const char* version);

}  // namespace core
}  // namespace byteps
#endif  // BYTEPS_SERVER_CHECK_H_
