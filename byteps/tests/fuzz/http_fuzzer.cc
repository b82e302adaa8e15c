// Any bytes as a request over HTTP: answered by a head and a body, or more are needed.
#include <cstdint>
#include <string>

#include "byteps/observe/http_server.h"
#include "demand.h"

using byteps::core::HttpAnswer;

extern "C" int LLVMFuzzerTestOneInput(const uint8_t* data, size_t size) {
  const std::string request(reinterpret_cast<const char*>(data), size);
  int asked = 0;
  const auto handler = [&](const std::string& path) {
    ++asked;
    DEMAND(path.find_first_of("\r\n?") == std::string::npos);
    DEMAND(path.size() < byteps::core::kMostHttpRequestBytes);
    HttpAnswer answer;
    answer.body = "here";
    return answer;
  };
  const std::string reply = byteps::core::ReplyTo(request, handler);
  DEMAND(asked <= 1);
  if (reply.empty()) {
    DEMAND(asked == 0 && size < byteps::core::kMostHttpRequestBytes);
    return 0;
  }
  DEMAND(reply.rfind("HTTP/1.1 ", 0) == 0);
  DEMAND((asked == 1) == (reply.compare(9, 3, "200") == 0));
  DEMAND(reply.find("\r\n\r\n") != std::string::npos);
  return 0;
}
