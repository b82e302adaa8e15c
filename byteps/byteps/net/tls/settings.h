// Whether and how the connections of a job are encrypted; see net/tls/tls.h.
#ifndef BYTEPS_NET_TLS_SETTINGS_H_
#define BYTEPS_NET_TLS_SETTINGS_H_

#include "byteps/net/auth/secret.h"

namespace ps {
namespace tls {

// Throws Error that says what is wrong with BYTEPS_TLS and BYTEPS_TLS_*, or with the files
// that they name.
void CheckSettings(const auth::Secret& secret);

}  // namespace tls
}  // namespace ps
#endif  // BYTEPS_NET_TLS_SETTINGS_H_
