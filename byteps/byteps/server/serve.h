// The scheduler or a server, from its start to the end of its job.
#ifndef BYTEPS_SERVER_SERVE_H_
#define BYTEPS_SERVER_SERVE_H_

#include "byteps/server/options.h"
#include "byteps/server/parent.h"

namespace byteps {
namespace core {

// Returns the exit status.  Throws Error when the job fails or cannot be joined.
int Serve(const Arguments& arguments, const Parent& parent, const char* version);

// The signal that this process was told to end by; 0: none.
int CaughtSignal();

// The exit status of a process that ends by it.
int SignalStatus();

}  // namespace core
}  // namespace byteps
#endif  // BYTEPS_SERVER_SERVE_H_
