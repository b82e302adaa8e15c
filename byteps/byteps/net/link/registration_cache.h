// RegistrationCache: memory that transports register once and use for many messages.
#ifndef BYTEPS_NET_LINK_REGISTRATION_CACHE_H_
#define BYTEPS_NET_LINK_REGISTRATION_CACHE_H_

#include <cstddef>
#include <cstdint>
#include <functional>
#include <memory>

namespace ps {

// The registration cache: memory that is sent from, or received into, again and again.
//
// Some transports have to register memory with a device before it may be used, which takes as
// long as sending it.  Who owns memory that will be used more than once adds it here; a
// transport registers all of it at its first use, and not for each message.
//
// A registration is of pages, not of addresses: were one used for other memory that came to
// lie at the same address, old pages would be sent.  So all memory from which values are sent,
// and in which they are received, has to be added, by its owner and again for each allocation;
// what it overlaps has been freed, and is forgotten.

// Any thread may call anything.
class RegistrationCache {
 public:
  // These bytes are one allocation, until Remove is called with the number that is
  // returned, which is to be before they are freed.
  static uint64_t Add(const void* address, size_t bytes);
  // Does nothing when the memory was forgotten already.  A message in flight keeps the
  // registration that it uses.
  static void Remove(uint64_t number);

  // ----- for transports

  using Registration = std::shared_ptr<void>;
  // Registers memory; null, or an exception, when that cannot be had.
  using Register = std::function<Registration(const void* address, size_t bytes)>;

  // The registration of the memory in which all these bytes lie.  Null when they lie in
  // none, or it could not be registered, which is tried once.  With no `make` the answer
  // comes at once, and is null too when the memory is not registered yet.
  static Registration Find(const void* address, size_t bytes, const Register& make);
  // Lets go of every registration.  The memory stays known.
  static void ForgetRegistrations();

  // Registrations that this process has ever made, of memory in the cache or other.
  static uint64_t Registrations();
  static void CountRegistration();
};

// Where values go that nobody wants.

// What a place_for handler answers when it refuses values: a TCP transport takes no memory for
// them, and reads and drops them.  Their message comes with one empty value, and with the bytes
// that it had as meta.data_size.  A message whose values found no memory comes likewise.
inline char* Nowhere() {
  static char nowhere;
  return &nowhere;
}

}  // namespace ps

#endif  // BYTEPS_NET_LINK_REGISTRATION_CACHE_H_
