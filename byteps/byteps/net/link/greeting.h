// What a greeting that failed means, over any transport.
//
// A refusal with a proof is what this very process decided: it is final, unless it says that what
// stands in the way will pass.  Everything else (no proof, or a wrong one, bytes that do not parse,
// an alert of TLS, another version) may as well come from bytes that were damaged on the way.  On a
// link that was there before it is one failed attempt, and the next one is made until
// BYTEPS_RECONNECT_TIMEOUT_S is over; on a first connection it is final, since there it almost
// always means different settings.
#ifndef BYTEPS_NET_LINK_GREETING_H_
#define BYTEPS_NET_LINK_GREETING_H_

namespace ps {

enum class GreetingFailure {
  kMaybeDamaged,  // nothing proves that the other end has said so
  kDecided,       // the other end has, and it was the one that was meant
  kWillPass,      // it is not ready yet, such as one of an earlier incarnation of the job
};

// Whether another attempt is made.  `link_was_there`: the greeting is that of a link that broke.
inline bool IsOneMoreAttempt(GreetingFailure failure, bool link_was_there) {
  if (failure == GreetingFailure::kWillPass) return true;
  return link_was_there && failure == GreetingFailure::kMaybeDamaged;
}

}  // namespace ps
#endif  // BYTEPS_NET_LINK_GREETING_H_
