// Text that came from the network and that nobody vouches for.
#ifndef BYTEPS_BASE_FOREIGN_TEXT_H_
#define BYTEPS_BASE_FOREIGN_TEXT_H_

#include <cstddef>
#include <string>

namespace ps {

// `text` as a log or a terminal may show it: in quotes, of printable ASCII alone, and no longer
// than `most` bytes of it.  So it can neither begin a line of its own nor end its quotes.
std::string ForeignText(const std::string& text, size_t most = 400);

// What is said of a refusal for the reason `text`.  `authenticated`: the peer has proved that it is
// of this job.
std::string RefusedBecause(const std::string& text, bool authenticated);

}  // namespace ps
#endif  // BYTEPS_BASE_FOREIGN_TEXT_H_
