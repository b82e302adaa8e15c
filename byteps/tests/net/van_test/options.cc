#include "options.h"

#include <getopt.h>

#include <cstdio>
#include <cstdlib>
#include <sstream>

namespace van_test {

Options options;

namespace {

[[noreturn]] void Usage(const std::string& error) {
  fprintf(stderr, "van_test: %s; the head of van_test/options.h explains the options\n",
          error.c_str());
  exit(2);
}

std::vector<std::string> Fields(const std::string& text, char separator) {
  std::vector<std::string> fields;
  std::istringstream in(text);
  for (std::string field; std::getline(in, field, separator);) fields.push_back(field);
  return fields;
}

}  // namespace

void Parse(int argc, char** argv) {
  const option long_options[] = {
      {"transport", 1, nullptr, 't'}, {"host", 1, nullptr, 'h'},    {"workers", 1, nullptr, 'w'},
      {"servers", 1, nullptr, 's'},   {"rounds", 1, nullptr, 'r'},  {"sizes", 1, nullptr, 'z'},
      {"window", 1, nullptr, 'o'},    {"ping-ms", 1, nullptr, 'p'}, {"kill", 1, nullptr, 'k'},
      {"break", 1, nullptr, 'b'},     {"expect", 1, nullptr, 'e'},  {"timeout", 1, nullptr, 'x'},
      {"places", 1, nullptr, 'l'},    {"abandon", 1, nullptr, 'a'}, {"stall", 1, nullptr, 'y'},
      {"refused", 1, nullptr, 'f'},   {nullptr, 0, nullptr, 0}};
  for (int c; (c = getopt_long(argc, argv, "", long_options, nullptr)) != -1;) {
    const std::string value = optarg == nullptr ? "" : optarg;
    const auto fields = Fields(value, ':');
    switch (c) {
      case 't':
        options.transport = value;
        break;
      case 'h':
        options.host = value;
        break;
      case 'w':
        options.workers = atoi(optarg);
        break;
      case 's':
        options.servers = atoi(optarg);
        break;
      case 'r':
        options.rounds = atoi(optarg);
        break;
      case 'z':
        options.sizes.clear();
        for (const auto& size : Fields(value, ',')) options.sizes.push_back(std::stoull(size));
        break;
      case 'o':
        options.window = atoi(optarg);
        break;
      case 'p':
        options.ping_ms = atoi(optarg);
        break;
      case 'l':
        if (value != "cached" && value != "plain") Usage("--places cached|plain");
        options.places = value;
        break;
      case 'a':
        options.abandon_round = atoi(optarg);
        break;
      case 'y':
        options.stall_round = atoi(optarg);
        break;
      case 'f':
        options.refused = atoi(optarg);
        break;
      case 'k':
        if (fields.size() != 3) Usage("--kill ROLE:RANK:ROUND");
        options.kill_role = fields[0];
        options.kill_rank = std::stoi(fields[1]);
        options.kill_round = std::stoi(fields[2]);
        break;
      case 'b':
        if (fields.size() != 2 && fields.size() != 3) Usage("--break PLANE:ROUND[:EVERY]");
        options.break_plane = fields[0];
        options.break_round = std::stoi(fields[1]);
        if (fields.size() == 3) options.break_every = std::stoi(fields[2]);
        break;
      case 'e':
        options.expect = value;
        break;
      case 'x':
        options.timeout_s = atof(optarg);
        break;
      default:
        Usage("bad option");
    }
  }
  if (optind < argc) Usage(std::string("unexpected argument ") + argv[optind]);
}

}  // namespace van_test
