#ifndef BYTEPS_NET_LINK_REGISTRATION_CACHE_H_
#define BYTEPS_NET_LINK_REGISTRATION_CACHE_H_

#include <cstddef>
#include <cstdint>
#include <functional>
#include <memory>

namespace ps {

// Cache of registrations of memory that is sent from or received into repeatedly.
//
// Some transports must register memory with a device before use, which takes as long as sending it.
// The owner of reused memory adds it to the cache. A transport then registers the memory once, at
// its first use.
//
// A registration holds pages, not addresses. If other memory later lies at the same address, an old
// registration would send the old pages. So owners must add all memory that values are sent from or
// received into, and must add each allocation anew. If older entries overlap a new allocation,
// their memory must have been freed, so they are dropped.
//
// Thread-safe.
class RegistrationCache {
 public:
  // Adds one allocation. Pass the returned number to Remove before the memory is freed.
  static uint64_t Add(const void* address, size_t bytes);
  // Removes the entry of this number, unless it was dropped already. A message in flight keeps its
  // registration.
  static void Remove(uint64_t number);

  // ----- for transports

  using Registration = std::shared_ptr<void>;
  // Registers memory. Returns null or throws on failure.
  using Register = std::function<Registration(const void* address, size_t bytes)>;

  // Returns the registration of the allocation that contains all these bytes. If there is none yet,
  // makes it by `make`. Returns null if no allocation contains the bytes, or if registering has
  // failed (each allocation is registered only once). Without `make`, returns null if the memory is
  // not registered yet.
  static Registration Find(const void* address, size_t bytes, const Register& make);
  // Drops all registrations. The allocations stay known.
  static void ForgetRegistrations();

  // Returns the number of registrations that this process has ever made, even of memory outside
  // this cache.
  static uint64_t Registrations();
  static void CountRegistration();
};

// Returns an address that stands for "no destination".
//
// A place_for handler returns Nowhere() to refuse values. A TCP transport then reads and drops
// them, and needs no memory for them. The message arrives with one empty value, and with the number
// of dropped bytes in meta.data_size. The same happens if there was no memory for the values.
inline char* Nowhere() {
  static char nowhere;
  return &nowhere;
}

}  // namespace ps

#endif  // BYTEPS_NET_LINK_REGISTRATION_CACHE_H_
